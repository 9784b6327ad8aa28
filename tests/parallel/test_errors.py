# SPDX-License-Identifier: Apache-2.0
"""Bad input on some rank: an error on every rank that says what and who, and then life goes on."""

import functools

import numpy as np
import pytest
import torch
from mpi4py import MPI

import farandole as fd
import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2, 4)

f4, i4 = np.float32, np.int32


@pytest.fixture(autouse=True)
def _still_usable():
    yield
    x = np.full(3, fd.rank() + 1.0)
    total = fd.size() * (fd.size() + 1) / 2
    assert fd.allreduce(x, op=fd.Sum, name="afterwards").tolist() == [total] * 3
    assert fd.allreduce(x, op=fd.Sum).tolist() == [total] * 3


def allreduce(x, **options):
    return lambda name: fd.allreduce(x, name=name, **options)


def allgather(x):
    return lambda name: fd.allgather(x, name=name)


def torch_(operation, *shape, dtype=torch.float32, **options):
    """The same on tensors; of a shape that every number of ranks divides, unless one is given."""

    def call(name):
        x = torch.ones(shape or (fd.size(),), dtype=dtype)
        needs: dict = {}
        if operation == "alltoall":
            needs["splits"] = [len(x)] + [0] * (fd.size() - 1)
        if operation == "broadcast":
            needs["root_rank"] = fd.size() - 1
        return getattr(hvd, operation)(x, name=name, **{**needs, **options})

    return call


EVERY = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
REDUCE = ("allreduce", "reducescatter")
# What differs: the others' call, the last rank's call, what the text says beside ranks and name.
MISMATCHES = {
    "shape": (allreduce(np.ones(3)), allreduce(np.ones(4)), ["(3,)", "(4,)"]),
    "dimensions": (allreduce(np.ones(6)), allreduce(np.ones((2, 3))), ["(6,)", "(2, 3)"]),
    "0-d": (allreduce(np.ones(())), allreduce(np.ones(1)), ["()", "(1,)"]),
    "large shape": (allreduce(np.ones(10**6)), allreduce(np.ones(10**6 - 1)), ["(999999,)"]),
    "dtype of one size": (allreduce(np.ones(3, f4)), allreduce(np.ones(3, i4)), ["int32"]),
    "average": (allreduce(np.ones(3)), allreduce(np.ones(3), op=fd.Sum), ["Average", "Sum"]),
    "operation": (allreduce(np.ones(3)), allgather(np.ones(3)), ["allreduce", "allgather"]),
    "a rooted operation": (torch_("broadcast"), torch_("allgather"), ["broadcast", "allgather"]),
    "root": (
        torch_("broadcast", root_rank=0),
        torch_("broadcast", root_rank=1),
        ["0", "1", "root"],
    ),
    **{
        f"{x} dtype": (torch_(x), torch_(x, dtype=torch.float64), ["float32", "float64"])
        for x in EVERY
    },
    **{
        f"{x} shape {shape}": (torch_(x, 3, 4), torch_(x, *shape), ["(3, 4)", str(shape)])
        for x in (*REDUCE, "broadcast")
        for shape in ((13,), (6, 2), (3, 4, 1))
    },
    **{
        f"{x} rows' shape {shape}": (torch_(x, 3, 4), torch_(x, *shape), ["shape"])
        for x in ("allgather", "alltoall")
        for shape in ((3, 5), (3, 4, 1))
    },
    **{
        f"{x} {key}": (torch_(x, **{key: 0.25}), torch_(x, **{key: 0.5}), ["0.25", "0.5", key[:8]])
        for x in REDUCE
        for key in ("prescale_factor", "postscale_factor")
    },
    **{
        f"{x} op {op.name}": (torch_(x, op=fd.Sum), torch_(x, op=op), ["Sum", op.name.title()])
        for x in REDUCE
        for op in (fd.Average, fd.Min, fd.Max, *([fd.Adasum] if x == "allreduce" else []))
    },
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(case, named):
    usual, deviant, says = MISMATCHES[case]
    last = fd.size() - 1
    name = f"tensor of {case}" if named else None
    fd.barrier()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        (deviant if fd.rank() == last else usual)(name)
    assert type(caught.value) is fd.MismatchError
    text = str(caught.value)
    others = "rank 0" if last == 1 else f"ranks 0-{last - 1}"
    for part in [*says, f"rank {last}", others, name or "unnamed"]:
        assert part in text


def test_a_group_may_be_called_again_as_soon_as_it_has_failed():
    for turn in range(200):
        wrong = fd.rank() == turn % fd.size() and fd.size() > 1
        values = [np.full(2, fd.rank() + i, np.float64) for i in range(4)]
        if fd.size() > 1:
            odd = [x.astype(np.int32) if wrong else x for x in values]
            with pytest.raises(fd.MismatchError, match="dtype"):
                fd.grouped_allreduce(odd, op=fd.Sum, name="once more")
        results = fd.grouped_allreduce(values, op=fd.Sum, name="once more")
        sums = [sum(r + i for r in range(fd.size())) for i in range(4)]
        assert [y.tolist() for y in results] == [[s, s] for s in sums]


REFUSALS = {
    "byte order": (allreduce(np.ones(3, ">f4")), TypeError, ">f4"),
    "undefined op": (allreduce(np.ones(3, bool), op=fd.Sum), TypeError, "bool"),
    "a mask": (allreduce(np.ma.masked_array(np.ones(3), [0, 1, 0])), TypeError, "masked array"),
    **{
        name: (torch_("allreduce", 3, dtype=getattr(torch, name)), TypeError, name)
        for name in ("float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", REFUSALS)
def test_what_one_rank_refuses_fails_on_all(case, named):
    call, error, says = REFUSALS[case]
    last = fd.size() - 1
    name = f"refused {case}" if named else None
    if fd.rank() == last:
        with pytest.raises(error, match=says):
            call(name)
    else:
        with pytest.raises(error, match=f"rank {last}.*{says}"):
            fd.allreduce(np.ones(3), op=fd.Sum, name=name)


# Of all ranks alike.
WRONG = {
    "scalars gathered": (lambda: fd.allgather(np.ones(())), ValueError, "scalar"),
    "scalars exchanged": (lambda: fd.alltoall(np.ones(())), ValueError, "scalar"),
    "scalars scattered": (lambda: fd.reducescatter(np.ones(())), ValueError, "scalar"),
    "a sum of bool": (lambda: fd.reducescatter(np.ones(4, bool), op=fd.Sum), TypeError, "bool"),
    "uneven rows": (lambda: fd.alltoall(np.ones(fd.size() + 1)), ValueError, "multiple of"),
    "strided": (lambda: fd.allreduce_(np.ones((4, 4)).T[1:], name="x"), ValueError, "contiguous"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_all_ranks_refuse(case):
    call, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("adapter", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(
    "call",
    [fd.grouped_allreduce_, functools.partial(fd.grouped_allreduce_, op=fd.Adasum)],
    ids=["allreduce", "Adasum"],
)
def test_a_group_in_place_shares_no_memory(adapter, call):
    x = np.full(1000, fd.rank() + 1.0)
    for last in ([x], [x[:1]], [x[999:]], [x[:500], x[500:]]):
        parts = [adapter(part) for part in (x[:0], x, *last)]
        with pytest.raises(ValueError, match=r"tensors\[1\] and tensors\[.\] share memory"):
            call(parts, name="shared")
    assert (x == fd.rank() + 1.0).all()
    fd.grouped_allreduce_([adapter(x[:0]), adapter(x[500:]), adapter(x[:500])], name="halves")
    assert (x == (fd.size() + 1) / 2).all()


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_name_in_flight_is_taken(calls_before):
    for _ in range(calls_before):  # the next one takes the short way
        fd.allreduce(np.ones(3), name="taken")
    if fd.rank() == 0:
        handle = fd.allreduce_async(np.ones(3), name="taken")
        with pytest.raises(ValueError, match="taken"):
            fd.allreduce_async(np.ones(3), name="taken")
        with pytest.raises(ValueError, match="taken"):  # no tensor of it stays queued
            fd.grouped_allreduce_async([np.ones(1), np.ones(3)], name="taken")
    MPI.COMM_WORLD.Barrier()
    if fd.rank() != 0:  # the others learn nothing of that
        handle = fd.allreduce_async(np.ones(3), name="taken")
    assert handle.wait().tolist() == [1.0] * 3
    assert fd.allreduce(np.ones(3), name="taken").tolist() == [1.0] * 3
