# SPDX-License-Identifier: Apache-2.0
"""What the core counts, seen on every rank."""

import threading

import numpy as np
import pytest

import farandole as fd
from farandole.observe.flight import own_page


def since(before):
    return {name: value - before.get(name, 0) for name, value in fd.metrics().items()}


def test_counters_count():
    fd.barrier()
    before = fd.metrics()
    for step in range(5):
        fd.allreduce(np.full(400_000, fd.rank() + step, np.float32), name="counted")
    fd.allreduce(np.ones(3) * fd.rank())
    grown = since(before)
    assert grown["tensors_submitted"] == grown["tensors_done"] == 6
    assert grown["bytes_done"] == 5 * 1_600_000 + 24
    assert grown["buckets_done"] == 5
    assert grown["tensors_failed"] == 0
    assert 0 < grown["moving_ns"] < 60e9
    now, old = (x.histograms["bucket_bytes"] for x in (fd.metrics(), before))
    assert (now.count - old.count, now.sum - old.sum) == (5, 8_000_000)
    assert now.counts[21] - (*old.counts, *[0] * 22)[21] == 5  # 1,600,000 has 21 binary digits
    assert now.mean == now.sum / now.count


def test_a_failure_is_counted():
    before = fd.metrics()
    if fd.size() == 1:
        pytest.skip("needs two ranks that disagree")
    with pytest.raises(fd.MismatchError):
        fd.allreduce(np.ones(3000 + fd.rank()), name="uneven")
    assert since(before)["tensors_failed"] == 1


def test_the_late_rank_is_named():
    if fd.size() == 1:
        pytest.skip("needs two ranks")
    last = fd.broadcast_object(fd.local_size(), root_rank=0) - 1  # of those rank 0 can write to
    fd.barrier()
    before = {rank: one.times for rank, one in fd.metrics().stragglers.items()}
    first_here = fd.rank() - fd.local_rank()
    assert sorted(before) == list(range(first_here, first_here + fd.local_size()))
    for step in range(4):
        fd.broadcast_object(step, root_rank=0)  # nobody is ahead by a whole round
        if fd.rank() == last:
            threading.Event().wait(0.2)  # what is tested: to be late
        fd.allreduce(np.ones(10) * fd.rank(), name="late")
    fd.barrier()
    after = fd.metrics().stragglers
    if first_here != 0:  # on another host
        assert {rank: one.times for rank, one in after.items()} == before
        return
    assert after[last].times - before[last] >= 4
    assert after[last].seconds > 0.1


def test_no_call_is_open_when_all_are_done():
    handles = [fd.allreduce_async(np.full(9, fd.rank()), name=f"a.{k}") for k in range(50)]
    fd.allreduce(np.ones(3), name="of all")
    for handle in handles:
        handle.wait()
    assert own_page(1)["open"] == []
    fd.join()
    assert own_page(1)["open"] == []
