# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings end in the line of the program that made the call, on every rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.errors import warn
from harness.mpirun import mpirun
from harness.process import PATIENCE


def run(path: Path, program: str, **variables: str) -> str:
    path.write_text(program)
    return mpirun([sys.executable, str(path)], 2, PATIENCE, variables).out


@pytest.mark.parametrize(
    ("module", "maker"), [("torch", "torch.tensor(x)"), ("numpy", "numpy.asarray(x)")]
)
def test_a_wrong_argument(tmp_path: Path, module: str, maker: str) -> None:
    """Only rank 0 is wrong; rank 1 has left."""
    path = tmp_path / "wrong.py"
    calls = "allreduce(x)", "broadcast(x, 0)", "allreduce_async(x)"
    tries = (
        f"try: hvd.{call}\n"
        "except TypeError as reason:\n"
        "    print(len(traceback.extract_tb(reason.__traceback__)), 'frames', flush=True)\n"
        "    traceback.print_exc()\n"
        for call in calls
    )
    out = run(
        path,
        f"import sys, traceback\nimport numpy\nimport farandole.{module} as hvd\nhvd.init()\n"
        "x = 1.5\n"
        "if hvd.rank() == 1: hvd.shutdown(); sys.exit()\n" + "".join(tries),
    )
    frames = [int(count) for count in re.findall(r"(\d+) frames", out)]
    assert len(frames) == len(calls), out
    assert max(frames) <= 3, out
    assert out.count("Traceback (most recent call last)") == len(calls), out
    assert out.count(f"(for numbers: {maker};") == len(calls), out
    for line in (7, 11, 15):
        assert f'{path}", line {line}' in out


def test_errors_of_the_program_keep_their_frames(tmp_path: Path) -> None:
    out = run(
        tmp_path / "own.py",
        "import farandole as hvd\n"
        "hvd.init()\n"
        "class Odd:\n"
        "    @property\n"
        "    def __array_interface__(self): raise ValueError('of the program')\n"
        "hvd.allreduce(Odd())\n",
    )
    assert "in __array_interface__" in out, out
    assert "of the program" in out


def test_a_warning_cites_the_program(tmp_path: Path) -> None:
    """The ranks' models differ, and rank 0's variable does nothing."""
    path = tmp_path / "warns.py"
    out = run(
        path,
        "import torch\nimport farandole.torch as hvd\n"
        "hvd.init()\n"
        "torch.manual_seed(hvd.rank())\n"
        "model = torch.nn.Linear(2, 1)\n"
        "plain = torch.optim.SGD(model.parameters(), 0.1)\n"
        "optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())\n"
        "for _ in range(2):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n",
        HOROVOD_CYCLE_TIME="1",
    )
    warned = re.findall(r"^(.*):(\d+): (\w+Warning): ", out, re.MULTILINE)
    assert {(name, kind) for name, _, kind in warned} == {
        (str(path), "RuntimeWarning"),
        (str(path), "UserWarning"),
    }, out
    assert {number for _, number, kind in warned if kind == "RuntimeWarning"} == {"3"}


def test_a_warning_of_the_torch_backend_cites_the_program(tmp_path: Path) -> None:
    """Tries a default group and a later one, which torch makes by different ways."""
    path = tmp_path / "program.py"
    out = run(
        path,
        "import sys\nimport torch.distributed as dist\n"
        "sys.modules['ignite.distributed'] = dist\n"
        "dist.init_process_group('farandole')\n"
        "import warnings; warnings.simplefilter('always')\n"
        "dist.new_group(range(2))\n"
        "dist.destroy_process_group()\n",
    )
    warned = re.findall(r"^(.*):(\d+): RuntimeWarning: ignite", out, re.MULTILINE)
    assert warned[0] == (str(path), "4"), out
    assert {name for name, _ in warned} == {str(path)}, out


@pytest.mark.parametrize("between", ["keras.src.trainers", "tensorflow.python.eager", "contextlib"])
def test_a_warning_under_a_framework_cites_the_program(between: str) -> None:
    """As in fit(), which calls farandole's callback."""
    source = "def fit(callback):\n    callback()\n"
    framework: dict[str, Any] = {"__name__": between}
    exec(compile(source, "/framework.py", "exec"), framework)
    ours = {"__name__": "farandole.keras.callbacks", "warn": warn}
    exec("def callback():\n    warn('alone', UserWarning)\n", ours)
    with pytest.warns(UserWarning, match="alone") as caught:
        framework["fit"](ours["callback"])
    assert caught[0].filename == __file__
