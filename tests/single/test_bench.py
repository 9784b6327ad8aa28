# SPDX-License-Identifier: Apache-2.0
"""The data of `farandole bench`: right results pass, others are counted."""

import numpy as np
import pytest

from farandole.tools import bench, cli
from farandole.tools.bench_cases import COLLECTIVES, DTYPES, Case, Operand
from farandole.tools.bench_report import size_text


def inputs(name, dtype, nbytes, size):
    operands = [Operand(Case.of(name, dtype, nbytes, r, size)) for r in range(size)]
    for operand in operands:
        operand.fill()
    return operands


def results(name, arrays):
    """What NumPy makes of all ranks' arrays: each rank's output."""
    size = len(arrays)
    total = np.sum(arrays, axis=0, dtype=arrays[0].dtype) if name != "allgather" else None
    rows = [np.array_split(a, size) for a in arrays]
    return {
        "allreduce": lambda: [total] * size,
        "broadcast": lambda: [arrays[0]] * size,
        "allgather": lambda: [np.concatenate(arrays)] * size,
        "reducescatter": lambda: np.array_split(total, size),
        "alltoall": lambda: [np.concatenate([row[r] for row in rows]) for r in range(size)],
    }[name]()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_right_results_pass_and_one_wrong_element_is_counted(name, dtype):
    for size in (1, 2, 3, 5):
        operands = inputs(name, dtype, 1000, size)
        for x, output in zip(operands, results(name, [x.array for x in operands]), strict=True):
            assert x.wrong(output) == 0
            spoiled = output.copy()
            spoiled[len(spoiled) // 2] += 1
            assert x.wrong(spoiled) == 1
            assert x.wrong(output[:-1]) > 0


def test_elements_that_moved_are_found():
    x, _ = inputs("allreduce", "float32", 1 << 20, 2)
    (right, _) = results("allreduce", [y.array for y in inputs("allreduce", "float32", 1 << 20, 2)])
    for distance in (1, 16, 1024, 65536):
        assert x.wrong(np.roll(right, distance)) > 0


def test_sizes():
    assert bench._steps(4, 256, 8) == [4, 32, 256]
    assert [bench._size(x) for x in ("4", "64K", "2m")] == [4, 65536, 2 << 20]
    assert [size_text(n) for n in (4, 1536, 64 << 20)] == ["4B", "1.5K", "64M"]


@pytest.mark.parametrize(
    "arguments", [["-b", "4X"], ["--dtypes", "float8"], ["-f", "1"], ["-n", "0"]]
)
def test_wrong_arguments_are_named(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *arguments])
    assert repr(arguments[1]) in capsys.readouterr().err


def test_missing_packages_are_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs torch: pip install torch"):
        cli.main(["bench", "--peers", "gloo"])
