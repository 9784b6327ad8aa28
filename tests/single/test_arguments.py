# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of public calls that meet no other rank: one row per value, its error, its text.

Those of collective calls are in tests/parallel/test_arguments.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import farandole as fd
import farandole.torch as hvd
from farandole.calls.public_call import is_collective

Row = tuple[Callable[[], Any], type[Exception], str]
PARAMETERS = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 3))]


@pytest.fixture(autouse=True)
def _a_world_of_one() -> None:
    fd.init()


def optimizer(**options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(PARAMETERS, lr=0.1), **options)


def set_of(*ranks: Any) -> Callable[[], Any]:
    return lambda: fd.ProcessSet(ranks)


def with_option(name: str, value: Any, error: type[Exception], text: str) -> tuple[str, Row]:
    return f"{name} {value!r:.30}", (lambda: optimizer(**{name: value}), error, text)


def optimizers() -> Iterator[tuple[str, Row]]:
    """Each option of DistributedOptimizer with each value that is wrong for it."""
    p, _ = PARAMETERS
    names: list[Any] = [["a", "b"], [("a", x) for x in PARAMETERS], [("a", p)]]
    for value, text in zip(names, ("tuples", "repeats", "lacks"), strict=True):
        yield with_option("named_parameters", value, ValueError, text)
    yield with_option("named_parameters", 5, TypeError, "named_parameters is of type int")
    yield with_option("compression", 5, TypeError, "compression is 5, of type int")
    for wrong in (0, 1.5):
        text = "backward_passes_per_step is .*at least 1"
        yield with_option("backward_passes_per_step", wrong, ValueError, text)
    for factor in (0, 0.0, math.nan, math.inf):
        text = "gradient_predivide_factor is"
        yield with_option("gradient_predivide_factor", factor, ValueError, text)
    for name in ("backward_passes_per_step", "gradient_predivide_factor"):
        for value in ("2", None, [1]):
            yield with_option(name, value, TypeError, f"{name} is .*{type(value).__name__}")
    yield with_option("op", 17, ValueError, "op is 17")
    for name in ("op", "process_set", "groups"):
        for value in ("x", 1.5):
            yield with_option(name, value, TypeError, f"{name} is .*{type(value).__name__}")
    yield with_option("op", None, TypeError, "op is None")
    yield with_option("process_set", None, TypeError, "process_set is None")
    yield with_option("process_set", fd.ProcessSet([0]), ValueError, "not registered")
    yield with_option("groups", -1, ValueError, "number of groups")
    for groups in ([[p], [p]], [[torch.zeros(1)]]):
        yield with_option("groups", groups, ValueError, "each once")


# What does not go together, or is the wrong object.
OTHERS: dict[str, Row] = {
    **{
        f"predivided {op.name}": (
            lambda op=op: optimizer(gradient_predivide_factor=2.0, op=op),  # type: ignore[misc]
            ValueError,
            "Average only",
        )
        for op in (fd.Sum, fd.Adasum)
    },
    "Adasum gradient_as_bucket_view": (
        lambda: optimizer(op=fd.Adasum, gradient_as_bucket_view=True),
        ValueError,
        "gradient_as_bucket_view does not work with Adasum",
    ),
    "no optimizer": (
        lambda: hvd.DistributedOptimizer(nn.Linear(1, 1)),  # type: ignore[arg-type]
        TypeError,
        "optimizer is of type Linear",
    ),
    "LBFGS": (
        lambda: hvd.DistributedOptimizer(torch.optim.LBFGS(PARAMETERS)),
        ValueError,
        "LBFGS",
    ),
    "wrapped twice": (lambda: hvd.DistributedOptimizer(optimizer()), ValueError, "already"),
    "no passes": (lambda: optimizer().set_backward_passes_per_step(0), ValueError, "at least 1"),
    "lazy layers": (
        lambda: hvd.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d())),
        ValueError,
        r"Sequential.0 is a LazyBatchNorm1d: run one batch",
    ),
    **{
        f"{call} of {handle!r}": (
            lambda c=call, h=handle: getattr(hvd, c)(h),
            ValueError,
            "is not a handle",
        )
        for call in ("poll", "synchronize")
        for handle in (None, 17, "handle")
    },
    **{
        f"ranks {ranks}": (set_of(*ranks), ValueError, "process set")
        for ranks in ((), (0, 0), (0.5,), ("0",))
    },
    "a set of none": (lambda: fd.ProcessSet(5), TypeError, "not 5 of type int"),
    "negative dimensions": (lambda: fd.empty((3, -1)), ValueError, "negative"),
    "objects": (lambda: fd.empty(3, object), TypeError, "Python objects"),
    "no ranks": (lambda: fd.run(print, np=0), ValueError, "at least 1"),
    "hosts twice": (lambda: fd.run(print, np=2, hosts="a:2", hostfile="x"), ValueError, "not both"),
}
ROWS = {**dict(optimizers()), **OTHERS}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("case", ROWS)
def test_wrong_argument(case: str) -> None:
    call, error, text = ROWS[case]
    with pytest.raises(error, match=text):
        call()


def test_a_number_of_groups_by_its_old_name() -> None:
    with pytest.deprecated_call():
        optimizer(num_groups=2)


UNSENDABLE: list[tuple[Any, str]] = [
    (1.0, "float is not an array"),
    ([1, 2], "list is not an array"),
    (None, "NoneType"),
    (np.array(["a"]), "<U1"),
    (np.zeros(2, "datetime64[s]"), "datetime64"),
    (np.zeros(2, object), "object"),
    (np.zeros(2, ">i4"), ">i4"),
    (np.zeros(2, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")), ">V2"),
    (np.zeros(2, np.longdouble), "float128"),
]


@pytest.mark.parametrize(("x", "says"), UNSENDABLE)
def test_what_cannot_be_sent(x: Any, says: str) -> None:
    for call in (fd.allreduce, fd.allgather, fd.allreduce_):
        with pytest.raises(TypeError, match=says):
            call(x)


@pytest.mark.parametrize("x", [np.ones((3, 3)).T[1:], np.float64(1), np.ones(4)[::2]])
def test_what_cannot_be_changed_in_place(x: Any) -> None:
    with pytest.raises(ValueError, match="in place"):
        fd.allreduce_(x)


def test_every_other_call_with_arguments_is_here() -> None:
    """Or its test says why not: the framework's own checks, or tests of their own."""
    # test_lifecycle.py, test_timeline.py, test_agreement.py
    elsewhere = {"init", "start_timeline", "same_on_all_ranks"}
    here = {
        *("DistributedOptimizer", "convert_sync_batchnorm", "poll", "synchronize"),
        *("empty", "run"),
    }
    found = {
        name
        for module in (fd, hvd)
        for name in module.__all__
        if inspect.isfunction(function := getattr(module, name))
        and not is_collective(function)
        and inspect.signature(function).parameters
    }
    assert found == here | elsewhere
