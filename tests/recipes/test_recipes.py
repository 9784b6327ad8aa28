# SPDX-License-Identifier: Apache-2.0
"""The examples that need packages of others; `make test-recipes` has an environment for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.mpirun import MPI_ENVIRONMENT, mpirun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 240


@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("accelerate", "accelerate_digits.py"),
        ("lightning", "lightning_digits.py"),
        ("transformers", "transformers_trainer.py"),
    ],
)
def test_two_ranks_train_as_one_process_does(package: str, program: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"needs {package}: make test-recipes")
    command = [sys.executable, str(EXAMPLES / program)]
    parameters = str(tmp_path / "one.pt")
    alone = [*command, "--save", parameters]
    subprocess.run(alone, cwd=tmp_path, check=True, timeout=SECONDS)
    result = mpirun([*command, "--compare", parameters], 2, timeout=SECONDS)
    assert result.returncode == 0, result.out
    assert "parameters identical on all ranks: yes" in result.out, result.out
    assert "equal to one process with all data: yes" in result.out, result.out


PROGRAM = """
import sys
import torch.distributed as dist
import farandole.torch as hvd
if sys.argv[1] == "plain":
    hvd.init()
else:
    dist.init_process_group("farandole")
print(f"rank {hvd.rank()} of {hvd.size()}.", flush=True)
"""


def launch(options: list[str], folder: Path) -> tuple[int, str]:
    """The exit code of `accelerate launch` with these options, and what it has written."""
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options],
        env={**os.environ, **MPI_ENVIRONMENT},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize(("by", "mode"), [("torchrun", "backend"), ("mpirun", "plain")])
def test_accelerate_launch(by: str, mode: str, tmp_path: Path) -> None:
    """Its two launchers of several processes."""
    pytest.importorskip("accelerate", reason="needs accelerate: make test-recipes")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    own = ["--multi_gpu"] if by == "torchrun" else ["--cpu", "--mpirun_hostfile", "hosts"]
    code, out = launch([*own, "--num_processes=2", "program.py", mode], tmp_path)
    assert code == 0, out
    assert sorted(re.findall(r"rank \d of \d\.", out)) == ["rank 0 of 2.", "rank 1 of 2."], out


def test_accelerate_launch_that_starts_one_process_of_two(tmp_path: Path) -> None:
    """Without GPU and host file it does; that must not be a world of one."""
    pytest.importorskip("accelerate", reason="needs accelerate: make test-recipes")
    (tmp_path / "program.py").write_text(PROGRAM)
    code, out = launch(["--cpu", "--num_processes=2", "program.py", "plain"], tmp_path)
    assert code != 0, out
    assert re.search(r"LibraryError: accelerate launch was asked .*Remedy: `mpirun", out), out
    code, out = launch(["--cpu", "--num_processes=1", "program.py", "plain"], tmp_path)
    assert code == 0, out
    assert "rank 0 of 1." in out
