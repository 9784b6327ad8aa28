# SPDX-License-Identifier: Apache-2.0
"""Bad input on some rank: an error on every rank that says what and who, and then life goes on."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mpi4py import MPI

import farandole as fd

pytestmark = pytest.mark.ranks(2, 4)

SOON = 8.0  # seconds until every rank knows: at once, but for a busy machine; stalls take longer
f4, f8, i4 = np.float32, np.float64, np.int32


@pytest.fixture(autouse=True)
def _still_usable():
    yield
    x = np.full(3, fd.rank() + 1.0)
    total = fd.size() * (fd.size() + 1) / 2
    assert fd.allreduce(x, op=fd.Sum, name="afterwards").tolist() == [total] * 3
    assert fd.allreduce(x, op=fd.Sum).tolist() == [total] * 3


def allreduce(x, **options):
    return lambda name: fd.allreduce(x, name=name, **options)


def broadcast(x, root):
    return lambda name: fd.broadcast(x, root, name=name)


def allgather(x):
    return lambda name: fd.allgather(x, name=name)


def group(*tensors):
    return lambda name: fd.grouped_allreduce(list(tensors), name=name)


# What differs: the others' call, the last rank's call, what the text says beside ranks and name.
MISMATCHES = {
    "shape": (allreduce(np.ones(3)), allreduce(np.ones(4)), ["(3,)", "(4,)"]),
    "dimensions": (allreduce(np.ones(6)), allreduce(np.ones((2, 3))), ["(6,)", "(2, 3)"]),
    "0-d": (allreduce(np.ones(())), allreduce(np.ones(1)), ["()", "(1,)"]),
    "large shape": (allreduce(np.ones(10**6)), allreduce(np.ones(10**6 - 1)), ["(999999,)"]),
    "dtype": (allreduce(np.ones(3, f4)), allreduce(np.ones(3, f8)), ["float32", "float64"]),
    "dtype of one size": (allreduce(np.ones(3, f4)), allreduce(np.ones(3, i4)), ["int32"]),
    "op": (allreduce(np.ones(3), op=fd.Sum), allreduce(np.ones(3), op=fd.Max), ["Sum", "Max"]),
    "average": (allreduce(np.ones(3)), allreduce(np.ones(3), op=fd.Sum), ["Average", "Sum"]),
    "operation": (allreduce(np.ones(3)), allgather(np.ones(3)), ["allreduce", "allgather"]),
    "root": (broadcast(np.ones(3), 0), broadcast(np.ones(3), 1), ["0", "1", "root"]),
    "prescale": (
        allreduce(np.ones(3), prescale_factor=0.5),
        allreduce(np.ones(3), prescale_factor=0.25),
        ["0.5", "0.25", "prescale"],
    ),
    "postscale": (
        allreduce(np.ones(3)),
        allreduce(np.ones(3), postscale_factor=3.0),
        ["1", "3", "postscale"],
    ),
    "broadcast shape": (broadcast(np.ones(3), 0), broadcast(np.ones(2), 0), ["(3,)", "(2,)"]),
    "allgather rows' shape": (allgather(np.ones((1, 2))), allgather(np.ones((1, 3))), ["2", "3"]),
    "allgather dimensions": (allgather(np.ones(2)), allgather(np.ones((2, 1))), ["shape"]),
    "allgather dtype": (allgather(np.ones(2, f4)), allgather(np.ones(2, f8)), ["float32"]),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(case, named):
    usual, deviant, says = MISMATCHES[case]
    last = fd.size() - 1
    name = f"tensor of {case}" if named else None
    fd.barrier()
    start = time.monotonic()
    with pytest.raises(fd.MismatchError) as caught:
        (deviant if fd.rank() == last else usual)(name)
    assert time.monotonic() - start < SOON
    text = str(caught.value)
    others = "rank 0" if last == 1 else f"ranks 0-{last - 1}"
    for part in [*says, f"rank {last}", others, name or "unnamed"]:
        assert part in text


def test_the_second_use_of_a_name_may_mismatch():
    for _ in range(3):
        assert fd.allreduce(np.ones(3), name="used").tolist() == [1.0] * 3
    with pytest.raises(fd.MismatchError, match="'used'"):
        fd.allreduce(np.ones(3 + fd.rank() % 2), name="used")
    assert fd.allreduce(np.ones(3), name="used").tolist() == [1.0] * 3


def test_a_mismatch_in_one_group_fails_its_members():
    tensors = [np.ones(2), np.ones(3 if fd.rank() else 4), np.ones(5)]
    with pytest.raises(fd.MismatchError, match=r"\(3,\)"):
        fd.grouped_allreduce(tensors, name="mixed group")


def test_others_in_flight_survive_a_mismatch():
    good = [fd.allreduce_async(np.full(4, i), op=fd.Sum, name=f"good {i}") for i in range(20)]
    with pytest.raises(fd.MismatchError):
        fd.allreduce(np.ones(1 + fd.rank() % 2), name="bad")
    for i, handle in enumerate(good):
        assert handle.wait().tolist() == [i * fd.size()] * 4


REFUSALS = {
    "byte order": (lambda: np.ones(3, ">f4"), TypeError, ">f4"),
    "undefined op": (lambda: np.ones(3, bool), TypeError, "bool"),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", REFUSALS)
def test_what_one_rank_refuses_fails_on_all(case, named):
    make, error, says = REFUSALS[case]
    last = fd.size() - 1
    name = f"refused {case}" if named else None
    start = time.monotonic()
    if fd.rank() == last:
        with pytest.raises(error, match=says):
            fd.allreduce(make(), op=fd.Sum, name=name)
    else:
        with pytest.raises(error, match=f"rank {last}.*{says}"):
            fd.allreduce(np.ones(3), op=fd.Sum, name=name)
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
def test_a_factor_that_is_infinite(factor):
    infinite = fd.allreduce(np.ones(3), name="scaled", **{factor: float("inf")})
    assert np.isinf(infinite).all()


def test_in_place_refuses_what_is_not_contiguous():
    grid = np.ones((4, 4))
    with pytest.raises(ValueError, match="contiguous"):
        fd.allreduce_(grid.T[1:], name="strided")
    with pytest.raises(ValueError, match="read-only"):
        fd.allreduce_(b"bytes", name="read-only")


def test_scalars_cannot_be_concatenated():
    for call in (fd.allgather, fd.alltoall, fd.reducescatter):
        with pytest.raises(ValueError, match="scalar"):
            call(np.ones(()))


def test_reducescatter_sums_and_averages_only_known_dtypes():
    with pytest.raises(TypeError, match="bool"):
        fd.reducescatter(np.ones(4, bool), op=fd.Sum)


def test_a_name_in_flight_is_taken():
    if fd.rank() == 0:
        handle = fd.allreduce_async(np.ones(3), name="taken")
        with pytest.raises(ValueError, match="taken"):
            fd.allreduce_async(np.ones(3), name="taken")
    MPI.COMM_WORLD.Barrier()
    if fd.rank() != 0:
        handle = fd.allreduce_async(np.ones(3), name="taken")
    assert handle.wait().tolist() == [1.0] * 3
    assert fd.allreduce(np.ones(3), name="taken").tolist() == [1.0] * 3


def test_waiting_with_a_timeout():
    if fd.rank() == 0:
        handle = fd.allreduce_async(np.ones(3), op=fd.Sum, name="late")
        with pytest.raises(fd.StallError, match="late"):
            handle.wait(timeout=0.2)
        with pytest.raises(fd.StallError, match=r"0\.1"):
            fd.allreduce(np.ones(3), name="later", timeout=0.1)
    MPI.COMM_WORLD.Barrier()
    if fd.rank() != 0:
        handle = fd.allreduce_async(np.ones(3), op=fd.Sum, name="late")
        fd.allreduce(np.ones(3), name="later")
    assert handle.wait().tolist() == [fd.size()] * 3


def test_unnamed_calls_from_a_second_thread_are_refused():
    fd.allreduce(np.ones(1))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="give it a name"):
            pool.submit(fd.allreduce, np.ones(1)).result()
        assert pool.submit(fd.allreduce, np.ones(1), name="from a thread").result() == 1
