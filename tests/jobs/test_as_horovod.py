# SPDX-License-Identifier: Apache-2.0
"""python -m farandole.as_horovod: whole Horovod scripts, unmodified, under mpirun and alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.mpirun import mpirun
from harness.process import ended

SCRIPTS = Path(__file__).resolve().parents[1] / "horovod_scripts"
COMMAND = [sys.executable, "-m", "farandole.as_horovod"]

# Whole scripts, each as a program of its own, in processes that import torch once. The last one
# makes a real stall, which is to end soon.
ONE_AFTER_THE_OTHER = f"""
import os, runpy, sys
import horovod.torch as hvd
lines = "amp.py --epochs 2", "amp.py --fp16-allreduce", "elastic.py"
for arguments in map(str.split, lines):
    sys.argv[:] = arguments
    if arguments == ["elastic.py"]:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
        os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
    try:
        runpy.run_path({str(SCRIPTS)!r} + "/" + arguments[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, arguments
    hvd.shutdown()
"""


def test_scripts_at_two_ranks(tmp_path: Path) -> None:
    """Mixed precision, the same with fp16 between ranks, elastic training."""
    program = tmp_path / "scripts.py"
    program.write_text(ONE_AFTER_THE_OTHER)
    result = mpirun([*COMMAND, str(program)], 2, timeout=120)
    assert result.returncode == 0, result.out
    assert result.out.count("parameters equal: True") == 2
    assert result.out.count("elastic done on rank") == 2


def alone(*arguments: str, cwd: Path = SCRIPTS) -> subprocess.CompletedProcess[str]:
    return ended([*COMMAND, *arguments], cwd=cwd)


@pytest.mark.parametrize("as_module", [False, True])
def test_spawned_processes_and_exit_codes(as_module: bool) -> None:
    program = ["-m", "spawned"] if as_module else ["spawned.py"]
    result = alone(*program, "7", "--x", "-m")
    assert result.returncode == 7, result.stderr
    assert result.stdout.splitlines() == [
        "child of size 1, farandole.as_horovod.basics",
        "1 SUM",
        "argv: ['7', '--x', '-m'] __main__ True",
        "late: Answer 0.28.1",
    ]


def test_a_script_that_starts_itself_by_horovod_run() -> None:
    result = alone("through_run.py", "--num-proc", "2", "--communication", "mpi")
    assert result.returncode == 0, result.stderr
    assert "results: [[0, 2, 'mpi'], [1, 2, 'mpi']]" in result.stdout


@pytest.mark.parametrize("path", ["", "env = dict(os.environ, PYTHONPATH='/nowhere')\n"])
def test_a_script_that_starts_horovodrun(path: str, tmp_path: Path) -> None:
    rank = "import horovod.torch as hvd; hvd.init(); print(f'rank {hvd.rank()} of {hvd.size()}')"
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, subprocess, sys\n"
        f"env = None\n{path}"
        f"line = ['horovodrun', '--gloo', '-np', '2', sys.executable, '-c', {rank!r}]\n"
        "sys.exit(subprocess.run(line, env=env).returncode)\n"
    )
    result = alone(str(script))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


def test_an_exception_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    script = tmp_path / "broken.py"
    script.write_text("import helper\nraise ValueError(helper.VALUE, __file__)\n")
    result = alone(str(script), cwd=tmp_path.parent)
    assert result.returncode == 1
    assert f'File "{script}", line 2' in result.stderr
    assert f"ValueError: (3, '{script}')" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nowhere.py"]])
def test_what_cannot_run_is_told(arguments: list[str]) -> None:
    result = alone(*arguments)
    assert result.returncode == 1
    assert "farandole.as_horovod" in result.stderr


def test_modules_exist_and_run_names_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "modules.py"
    script.write_text(
        "import horovod, importlib, pickle\n"
        "for name in '''torch torch.mpi_ops torch.compression torch.functions torch.optimizer\n"
        "    torch.sync_batch_norm torch.elastic torch.elastic.state torch.elastic.sampler common\n"
        "    common.util common.exceptions common.process_sets common.elastic common.basics\n"
        "    '''.split():\n"
        "    importlib.import_module('horovod.' + name)\n"
        "import farandole.torch, horovod.torch\n"
        "assert horovod.torch.DistributedOptimizer is farandole.torch.DistributedOptimizer\n"
        "from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError\n"
        "from horovod.common.exceptions import HostsUpdatedInterrupt\n"
        "assert HorovodInternalError is farandole.FarandoleError\n"
        "assert HostsUpdatedInterrupt(True).skip_sync\n"
        "assert HorovodVersionMismatchError('torch', '1', '2').installed_version == '2'\n"
        "from horovod.common.util import check_extension, gpu_available, split_list\n"
        "from horovod.common.util import num_rank_is_power_2, is_iterable, extension_available\n"
        "check_extension('horovod.torch', 'HOROVOD_WITH_PYTORCH', __file__, 'mpi_lib_v2')\n"
        "assert extension_available('torch') and not extension_available('mxnet')\n"
        "assert gpu_available('torch') in (True, False)\n"
        "assert split_list(list(range(5)), 3) == [[0, 1], [2, 3], [4]]\n"
        "assert [n for n in range(9) if num_rank_is_power_2(n)] == [1, 2, 4, 8]\n"
        "assert is_iterable('a') and not is_iterable(1)\n"
        "from horovod.common.basics import HorovodBasics\n"
        "basics = HorovodBasics(__file__, 'mpi_lib_v2'); basics.init(); assert basics.size() == 1\n"
        "assert horovod.run(max, (3, 4), num_proc=2, use_mpi=True) == [4, 4]\n"
        "assert horovod.run(min, (3, 4), np=2, hosts=None, use_gloo=False) == [3, 3]\n"
        "for numbers in ({'num_proc': 2, 'np': 3}, {'np': 1, 'min_np': 2}, {'num_proc': 0},\n"
        "                {'np': 3, 'max_np': 2}, {'num_proc': 4, 'max_num_proc': 3}):\n"
        "    try:\n        horovod.run(print, **numbers)\n"
        "    except ValueError as e:\n        assert 'horovod.run(' in str(e), e\n"
        "    else:\n        raise AssertionError(numbers)\n"
        "assert horovod.run(max, (3, 4), num_proc=2, use_gloo=True) == [4, 4]\n"
        "try:\n    check_extension('horovod.tensorflow', 'HOROVOD_WITH_TENSORFLOW', __file__)\n"
        "except ImportError as e:\n    print(e)\n"
    )
    result = alone(str(script))
    assert result.returncode == 0, result.stderr
    assert "tensorflow" in result.stdout
