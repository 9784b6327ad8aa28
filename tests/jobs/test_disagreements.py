# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other: the first line says why, the error comes soon, and programs that
can go on get none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.mpirun import MpiJob, mpirun
from harness.process import PATIENCE
from harness.supervised import SupervisedJob

QUICK = {"FARANDOLE_STALL_WARN": "1", "OMP_NUM_THREADS": "1"}
HEAD = """\
import os, sys, threading
import numpy as np
import farandole as fd
fd.init()
r = fd.rank()
def told():  # returns when the test has read the warning
    with open(sys.argv[1] + ".told", "rb", buffering=0) as pipe:
        pipe.read(1)
"""
TRAINING = """\
import torch
import farandole.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(100)])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in range(4 - hvd.rank()):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
hvd.allreduce(torch.tensor(float(hvd.rank())))
"""


def run(path: Path, program: str, **variables: str) -> tuple[int, str]:
    path.write_text(program)
    done = mpirun([sys.executable, str(path)], 2, PATIENCE, QUICK | variables)
    return done.returncode, done.out


def test_uneven_data_is_named_first(tmp_path: Path) -> None:
    code, out = run(tmp_path / "train.py", TRAINING, FARANDOLE_FLIGHT_DIR=str(tmp_path / "flight"))
    assert code != 0
    diagnosis = (
        "rank 1 left the training loop (train.py:10) while rank 0 is in backward (train.py:8): "
        "uneven data? use join() or drop_last"
    )
    lines = out.splitlines()  # mpirun may print rank 1's traceback before rank 0's warning
    ours = [line for line in lines if line.startswith("[rank ")]
    assert ours[0].endswith(f"farandole warning: {diagnosis}"), out
    assert out.count(f"StallError: no progress: {diagnosis}\n") >= 2, out  # on each rank
    assert out.count("  200 gradients of optimizer.0: rank 0 waiting") == 3, out
    # A traceback has a comma before "in".
    stacks = re.findall(r'File ".*/train.py", line (\d+) in <module>', out)
    assert sorted(stacks) == ["10", "8"], out
    assert len([line for line in lines if "prterun" not in line]) <= 48, out
    command = [sys.executable, "-m", "farandole", "explain", str(tmp_path / "flight")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first = next(line for line in told.splitlines() if line.startswith("First: "))
    assert diagnosis in first, told
    assert "for 200 gradients of optimizer.0; rank 1 never submitted them" in told, told
    assert len(told.splitlines()) < 12, told


ELASTIC = """\
import torch
import farandole.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
@hvd.elastic.run
def train(state):
    for batch in range(4 - hvd.rank()):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.tensor(float(hvd.rank())))
train(hvd.elastic.TorchState(model, optimizer))
"""


def test_uneven_data_ends_an_elastic_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    options = ["-np", "2", "--restarts", "1"]
    argv = [sys.executable, str(tmp_path / "train.py")]
    with SupervisedJob(options, argv, QUICK) as job:
        result = job.finish()
    diagnosis = "rank 1 left the training loop (train.py:12) while rank 0 is in backward"
    assert result.returncode != 0
    assert f"farandole warning: {diagnosis}" in result.out, result.out
    assert "without a commit: giving up" in result.out, result.out


GO_ON = {
    # Each rank's second thread makes what the other's main thread waits for, after the warning.
    "second thread": """
names = ["a", "b"] if r == 0 else ["b", "a"]
fd.barrier()
def late():
    told()
    fd.allreduce(np.full(2, r), name=names[1])
thread = threading.Thread(target=late)
thread.start()
fd.allreduce(np.full(2, r), name=names[0])
thread.join()
""",
    # Rank 0 does not wait for "a"; rank 1 makes it after "b", when it has computed.
    "asynchronous": """
if r == 0:
    handle = fd.allreduce_async(np.full(2, r), name="a")
    fd.allreduce(np.full(2, r), name="b")
    handle.wait()
else:
    told()
    fd.allreduce(np.full(2, r), name="b")
    fd.allreduce(np.full(2, r), name="a")
""",
    # Each has a limit of its own, and then makes the other's call.
    "own limits": """
names = ["a", "b"] if r == 0 else ["b", "a"]
handle = fd.allreduce_async(np.full(2, r), name=names[0])
while not os.path.exists(sys.argv[1]):
    try:
        handle.wait(timeout=1.5)
    except fd.StallError:
        pass
fd.allreduce(np.full(2, r), name=names[1])
handle.wait()
""",
}


@pytest.mark.parametrize("case", GO_ON)
def test_a_program_that_can_go_on_gets_no_error(tmp_path: Path, case: str) -> None:
    program, go = tmp_path / "program.py", tmp_path / "go"
    program.write_text(f"{HEAD}{GO_ON[case]}print(f'done {{r}}')\n")
    os.mkfifo(f"{go}.told")
    told = os.open(f"{go}.told", os.O_RDWR)  # so that readers wait for bytes, not for a writer
    with MpiJob([sys.executable, str(program), str(go)], 2, QUICK) as job:
        job.process.wait_for_output("some ranks wait for others:")
        job.process.wait_for_output("some ranks still wait for others")
        go.touch()
        os.write(told, b"12")  # a byte for each rank
        out = job.finish(PATIENCE).check().out
    os.close(told)
    assert "done 0" in out
    assert "done 1" in out
    assert "StallError" not in out


def test_ranks_that_wait_for_each_other_are_told_soon(tmp_path: Path) -> None:
    program = HEAD + (
        "def here(): fd.allreduce(np.full(2, r), name='here')\n"
        "def there(): fd.allreduce(np.full(2, r), name='there')\n"
        "try: (here, there)[r]()\n"
        "except fd.StallError as reason: print(f'rank {r} caught', str(reason).splitlines()[0])\n"
    )
    code, out = run(tmp_path / "program.py", program)
    assert code == 0, out
    for rank in (0, 1):
        assert (
            f"rank {rank} caught no progress: rank 0 waits in 'here' (allreduce) (program.py:9) "
            "while rank 1 waits in 'there' (allreduce) (program.py:10): make the same calls" in out
        ), out
