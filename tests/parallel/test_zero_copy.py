# SPDX-License-Identifier: Apache-2.0
"""Arrays in memory that all ranks map: the same bits as ordinary ones, no copies, no leaks."""

import copy
import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
from harness.arrays import DTYPES, OPS, has_op

LARGE = 700_001  # bytes and a bit: several stripes of several blocks
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if has_op(dtype, op)]


def values(dtype, shape, salt=0):
    """This rank's random numbers, whose sums depend on their order."""
    rng = np.random.default_rng([fd.rank(), salt, *shape])
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    numbers = np.asarray(rng.standard_normal(shape) * 100)
    if dtype.startswith("complex"):
        return np.asarray(numbers + 1j * rng.standard_normal(shape), dtype)
    return np.asarray(np.abs(numbers) if dtype.startswith("u") else numbers, dtype)


def shared(x):
    """A copy of `x` in mapped memory."""
    y = fd.empty(x.shape, x.dtype)
    y[...] = x
    return y


def mixed(x):
    """Mapped on odd ranks, ordinary on even ones."""
    return shared(x) if fd.rank() % 2 else x.copy()


def same_bits(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def shapes(dtype):
    n = LARGE // np.dtype(dtype).itemsize
    return [(), (1,), (7,), (0,), (3, 5), (n,), (n // 3, 3)]


@pytest.mark.parametrize(
    ("dtype", "op", "place"),
    [*((*terms, shared) for terms in REDUCTIONS), *(("float32", op, mixed) for op in OPS)],
)
def test_allreduce(dtype, op, place):
    op = getattr(fd, op)
    for shape in shapes(dtype):
        mine = values(dtype, shape)
        expected = fd.allreduce(mine, op=op)
        x = place(mine)
        assert fd.allreduce_(x, op=op) is x
        assert same_bits(x, expected)
        again = place(mine)
        assert same_bits(fd.allreduce(again, op=op), expected)
        assert same_bits(again, mine)


def test_slices_of_one_array():
    whole = shared(values("float32", (1_000_000,)))
    before = whole.copy()
    parts = [slice(1, 2), slice(10, 200_003), slice(300_001, 700_000), slice(800_000, 1_000_000)]
    expected = [fd.allreduce(before[part], op=fd.Sum) for part in parts]
    handles = [fd.allreduce_async_(whole[part], op=fd.Sum, name=f"{part}") for part in parts]
    for handle, part, result in zip(handles, parts, expected, strict=True):
        handle.wait()
        assert same_bits(whole[part], result)
        before[part] = result
    assert same_bits(whole, before)


def mapped_bytes():
    return fd.metrics()["mapped_bytes"]


def test_no_byte_of_it_is_copied():
    if fd.local_size() < fd.size():
        pytest.skip("needs one host: between hosts bytes travel")
    x = shared(values("float32", (1_000_000,)))
    for _ in range(2):  # in the first call the ranks find each other's memory
        before = mapped_bytes()
        fd.allreduce_(x)
    others = x.nbytes * (fd.size() - 1) // fd.size()
    slack = 0.2 * x.nbytes  # a small block at the end is staged
    assert abs(mapped_bytes() - before - 2 * others) <= slack
    before = mapped_bytes()
    fd.allreduce_(values("float32", (1_000_000,)))
    assert mapped_bytes() == before


def written_bytes():
    """Memory that was written to, here or by a rank that shares it. A library's pages are not: this
    process's part of them grows when another job's processes end."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    dirty = [line for line in lines if line.startswith(("Shared_Dirty:", "Private_Dirty:"))]
    return 1024 * sum(int(line.split()[1]) for line in dirty)


def test_nothing_leaks():
    def rounds(count):
        for i in range(count):
            x = fd.empty((1 << 20,), np.float32)  # 4 MiB
            x[:] = fd.rank() + i
            fd.allreduce_(x, op=fd.Sum)
            small = [fd.empty(10, np.int64) for _ in range(20)]
            fd.allreduce_(small[3])
            del x, small

    descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    rounds(3)
    gc.collect()
    fd.barrier()
    before = written_bytes()
    rounds(40)  # 160 MiB, were they kept
    gc.collect()
    fd.barrier()
    assert written_bytes() - before < 16 << 20
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= descriptors + 1


def test_views_keep_the_memory():
    x = shared(np.arange(600_000, dtype=np.float64))
    view = x[1000:2000].reshape(10, 100)[3]
    expected = view.copy()
    del x
    gc.collect()
    others = [shared(np.full(600_000, -1.0)) for _ in range(3)]
    assert same_bits(view, expected)
    del others


def test_copies_are_ordinary():
    x = shared(values("float32", (500_000,)))
    fd.allreduce_(x)
    before = mapped_bytes()
    for y in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x)), x + 0):
        assert same_bits(y, x)
        fd.allreduce_(y)
    assert mapped_bytes() == before


def test_a_forked_child_reads_and_writes_its_own():
    x = shared(np.arange(500_000, dtype=np.int64))
    fd.barrier()
    child = os.fork()
    if child == 0:
        good = x[-1] == 499_999
        x[:] = 0
        good = good and not x.any()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same_bits(np.asarray(x), np.arange(500_000, dtype=np.int64))
    expected = np.arange(500_000, dtype=np.int64) * fd.size()
    assert same_bits(fd.allreduce_(x, op=fd.Sum), expected)


def test_it_outlives_shutdown():
    mine = fd.rank() + 1.0
    x = shared(np.full(400_000, mine))
    fd.shutdown()
    assert (x == mine).all()
    y = fd.empty(400_000)
    y[:] = x
    fd.init()
    for z in (x, y):
        fd.allreduce_(z, op=fd.Sum)
        assert (z == fd.size() * (fd.size() + 1) / 2).all()
