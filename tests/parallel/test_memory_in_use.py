# SPDX-License-Identifier: Apache-2.0
"""Calls on memory that an earlier call of this rank still uses: all ranks raise an error, because
results would depend on timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.numpy as fn
import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2, 3)

COUNT = 3000
Second = Callable[[Any], Any]
SECONDS: dict[str, tuple[Second, Second]] = {  # on the memory of the first call, and apart from it
    "the same": (lambda x: x, np.zeros_like),
    "a part": (lambda x: x[COUNT // 2 :], lambda x: np.zeros(COUNT - COUNT // 2)),
    "beyond the end": (lambda x: x.base[10 : COUNT + 10], np.zeros_like),
}


def last_to_come(first: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """All ranks make `first`, which is under way on all but the last one in `meanwhile`."""
    token, last = np.zeros(1), fd.size() - 1
    if fd.rank() < last:
        handle = first()
        meanwhile()
        fd.send(token, last)
        return handle.wait()
    for source in range(last):
        fd.recv(token, source)
    meanwhile()
    return first().wait()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("which", SECONDS)
def test_a_second_writer_is_refused_on_all_ranks(which: str, reads: bool) -> None:
    overlapping, apart = SECONDS[which]
    x = np.full(COUNT + 10, 1.0 + fd.rank())[:COUNT]

    def first() -> Any:
        call = fd.allreduce_async if reads else fd.allreduce_async_
        return call(x, op=fd.Sum, name="memory.first")

    def meanwhile() -> None:
        late = fd.rank() == fd.size() - 1
        text = "refused" if late else r"in use by 'memory\.first'.* wait for that one first"
        with pytest.raises(ValueError, match=text):
            fd.allreduce_((apart if late else overlapping)(x), name="memory.second")

    total = last_to_come(first, meanwhile)
    assert (total == sum(1.0 + rank for rank in range(fd.size()))).all()
    assert (x == (1.0 + fd.rank() if reads else total)).all()
    fd.allreduce_(overlapping(x), name="memory.second")  # after the first one's end


def test_several_calls_may_read_the_same_memory() -> None:
    x = np.full(COUNT, 1.0 + fd.rank())
    handles = [fd.allreduce_async(x[i:], op=fd.Sum, name=f"memory.read.{i}") for i in range(20)]
    for handle in handles:
        assert (handle.wait() == sum(1.0 + rank for rank in range(fd.size()))).all()


def test_a_reader_of_memory_that_is_written_is_refused() -> None:
    x = np.full(COUNT, 1.0 + fd.rank())

    def meanwhile() -> None:
        y = np.zeros(1) if fd.rank() == fd.size() - 1 else x[-1:]
        with pytest.raises(ValueError, match=r"refused|in use"):
            fd.allgather(y, name="memory.reader")

    last_to_come(lambda: fd.allreduce_async_(x, op=fd.Sum, name="memory.written"), meanwhile)


def test_a_refused_parameter_leaves_no_peer_waiting() -> None:
    params, last = {name: np.full(COUNT, float(fd.rank())) for name in "abcd"}, fd.size() - 1

    def early() -> Any:
        return fd.allreduce_async_(params["b"], name="memory.early")

    handle = early() if fd.rank() < last else None
    with pytest.raises(ValueError, match=r"parameter\.b"):
        fn.broadcast_parameters(params, last)
    (handle or early()).wait()
    assert all((params[name] == last).all() for name in "acd")


def test_ranks_may_tie_other_weights() -> None:
    a, b = (np.full(COUNT, float(fd.rank())) for _ in range(2))
    c = {0: a, 1: b}.get(fd.rank(), np.full(COUNT, float(fd.rank())))
    b = a if fd.rank() == 1 else b
    fn.broadcast_parameters({"a": a, "b": b, "c": c}, 0)
    assert all((x == 0.0).all() for x in (a, b, c))


def test_tied_weights_are_broadcast() -> None:
    weight = torch.full((40, 3), float(fd.rank()))
    flat = torch.arange(12.0) * (1 + fd.rank())
    state = {"embedding": weight, "head": weight, "flat": flat, "part": flat[4:8], "end": flat[6:]}
    hvd.broadcast_parameters(state, root_rank=1)
    assert (weight == 1.0).all()
    assert torch.equal(flat, torch.arange(12.0) * 2)
    array = np.full(9, float(fd.rank()))
    fn.broadcast_parameters({"one": array, "two": array[3:], "three": array[::-1].copy()}, 1)
    assert (array == 1.0).all()
