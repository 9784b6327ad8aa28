# SPDX-License-Identifier: Apache-2.0
"""`import torch` where farandole is installed: it knows the backend, and costs nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farandole.launch.place import free_port
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import ended

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "_import_device_backends"), reason="torch before 2.5 loads no entry points"
)


def python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that no launcher has started, and that ends well."""
    done = ended([sys.executable, "-c", program], **MPI_ENVIRONMENT, **variables)
    done.check_returncode()
    return done


def test_nothing_of_the_package_is_imported() -> None:
    result = python(
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import torch, torch.distributed as dist\n"
        "assert 'farandole' in dist.Backend.backend_list\n"
        "assert not [x for x in sys.modules if x.startswith('farandole.')]\n"
        "assert {'farandole', 'cffi', 'mpi4py'}.isdisjoint(sys.modules)\n"
        "assert 'RANK' not in os.environ\n"
    )
    assert result.stderr == ""


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_a_world_of_one(method: str, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store" if method == "file" else f"tcp://localhost:{free_port()}"
    result = python(
        "import torch, torch.distributed as dist\n"
        f"dist.init_process_group('farandole', init_method='{address}', rank=0, world_size=1)\n"
        "x = torch.arange(3.0)\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist(), dist.get_backend())\n"
        "dist.destroy_process_group()\n"
        "import farandole.torch as hvd\n"
        "print(hvd.size())\n"
    )
    assert result.stdout.split("\n")[:2] == ["[0.0, 1.0, 2.0] farandole", "1"]


def test_other_backends_meet_by_torchs_own_means() -> None:
    result = python(
        "import sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\n"
        "assert 'farandole' not in sys.modules\n"
        "print(dist.get_world_size())\n",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(free_port()),
    )
    assert result.stdout == "1\n"


def test_a_failure_is_a_warning(tmp_path: Path) -> None:
    """Another package of the name, or half an installation."""
    (tmp_path / "farandole").mkdir()
    (tmp_path / "farandole" / "__init__.py").touch()
    result = python("import torch; print(torch.ones(1).item())", PYTHONPATH=str(tmp_path))
    assert result.stdout == "1.0\n"
    assert "RuntimeWarning: farandole failed to load in `import torch`" in result.stderr
    assert "Remedy: " in result.stderr
