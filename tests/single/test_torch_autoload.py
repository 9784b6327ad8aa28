# SPDX-License-Identifier: Apache-2.0
"""`import torch` where farandole is installed: it knows the backend, and changes nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import farandole_autoload
from farandole.launch.place import free_port
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import ended

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "_import_device_backends"), reason="torch before 2.5 loads no entry points"
)


def python(program: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that no launcher has started, and that ends well."""
    done = ended([sys.executable, "-c", program, *words], **MPI_ENVIRONMENT, **variables)
    done.check_returncode()
    return done


# The variables of one rank of two, as srun and Open MPI's mpirun set them.
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_nothing_changes_before_farandole_is_named() -> None:
    """In children neither. A script may take torch's own error for the sign that it runs alone. The
    import of the package sets the place."""
    result = python(
        "import os, subprocess, sys\n"
        "before = dict(os.environ)\n"
        "import torch, torch.distributed as dist\n"
        "assert 'farandole' in dist.Backend.backend_list\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "torch.optim.SGD(model.parameters(), 1.0).step()\n"
        "for backend in ('gloo', 'cpu:gloo', None):\n"
        "    try:\n"
        "        dist.init_process_group(backend)\n"
        "    except ValueError as reason:\n"
        "        print(reason)\n"
        "assert not [x for x in sys.modules if x.startswith('farandole.')]\n"
        "assert {'farandole', 'cffi', 'mpi4py'}.isdisjoint(sys.modules)\n"
        "added = {*os.environ} - {*before}\n"
        "assert not [name for name in added if 'RANK' in name or 'SIZE' in name], added\n"
        "program = 'import os, torch; print(os.environ.get(\"RANK\"))'\n"
        "subprocess.run([sys.executable, '-c', program], check=True)\n"
        "import farandole.torch\n"
        "print(*(os.environ[x] for x in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))",
        **SRUN,
        **MPIRUN,
    )
    *errors, rest = result.stdout.split("\n", 3)
    assert all("environment variable RANK expected" in error for error in errors)
    assert (rest, result.stderr) == ("None\n1 2 1 2\n", "")


def test_other_backends_meet_by_torchs_own_means_and_a_world_of_one(tmp_path: Path) -> None:
    """One world of farandole meets by file, one by TCP. A torch that keeps its handlers elsewhere
    is reason for a warning."""
    result = python(
        "import sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\n"
        "dist.destroy_process_group()\n"
        "assert 'farandole' not in sys.modules\n"
        "from farandole.arrays.kinds import kind_of\n"
        "assert type(kind_of(torch.ones(1))).__name__ == 'TorchKind'\n"
        f"for address in ('file://{tmp_path}/store', 'tcp://localhost:{free_port()}'):\n"
        "    dist.init_process_group('farandole', init_method=address, rank=0, world_size=1)\n"
        "    x = torch.arange(3.0)\n"
        "    dist.all_reduce(x)\n"
        "    print(x.tolist(), dist.get_backend())\n"
        "    dist.destroy_process_group()\n"
        "import farandole.torch as hvd\n"
        "print(hvd.size())\n"
        "import farandole_autoload\n"
        "del dist.Backend.FARANDOLE\n"
        "from torch.distributed.rendezvous import _rendezvous_handlers\n"
        "_rendezvous_handlers.clear()\n"
        "farandole_autoload.start()\n",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(free_port()),
    )
    assert result.stdout.split("\n")[:3] == ["[0.0, 1.0, 2.0] farandole"] * 2 + ["1"]
    assert "RuntimeWarning: farandole failed to load in `import torch`" in result.stderr
    assert "Remedy: " in result.stderr


def test_another_package_of_the_name_leaves_torch_alone(tmp_path: Path) -> None:
    (tmp_path / "farandole").mkdir()
    (tmp_path / "farandole" / "__init__.py").touch()
    result = python("import torch; print(torch.ones(1).item())", PYTHONPATH=str(tmp_path))
    assert (result.stdout, result.stderr) == ("1.0\n", "")


@pytest.mark.parametrize("backend", ["farandole", "Farandole", "cpu:farandole"])
def test_torch_asks_for_the_registrar(backend: str, tmp_path: Path) -> None:
    """From 2.14 on; also where it loads no device's backend."""
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("torch before 2.14 asks for no registrar")
    result = python(
        "import torch, torch.distributed as dist\n"
        "assert 'farandole' not in dist.Backend.backend_list\n"
        f"dist.init_process_group('{backend}', 'file://{tmp_path}/s', rank=0, world_size=1)\n"
        "x = torch.arange(3.0)\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist())\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert result.stdout == "[0.0, 1.0, 2.0]\n"


def test_the_registrar_is_where_torch_looks() -> None:
    (entry,) = entry_points(group="torch.distributed.backends", name="farandole")
    assert entry.load() is farandole_autoload.register
