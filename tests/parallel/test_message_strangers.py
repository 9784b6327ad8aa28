# SPDX-License-Identifier: Apache-2.0
"""Messages as people use them who have read no documentation."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import farandole as fd
import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2, 3)


def neighbours() -> tuple[int, int]:
    """Whom a rank sends to in a ring, and from whom it receives."""
    return (fd.rank() + 1) % fd.size(), (fd.rank() - 1) % fd.size()


def test_the_first_message_beside_the_first_unnamed_call() -> None:
    """A pair that opens once took that call for its own."""
    fd.shutdown()
    fd.init()
    to, source = neighbours()
    sums = [fd.allreduce_async(np.full(70_000, fd.rank() + 1.0), op=fd.Sum) for _ in range(3)]
    got = np.zeros(1)
    handle = fd.recv_async(got, source)
    fd.send(np.full(1, float(fd.rank())), to)
    assert handle.wait() == got[0] == source
    assert all(one.wait()[-1] == fd.size() * (fd.size() + 1) / 2 for one in sums)


def test_thousands_that_nobody_waits_for() -> None:
    """All handles and arrays are dropped at once, and every tag is new."""
    to, source = neighbours()
    count = 5000
    sums = [fd.allreduce_async(np.full(70_000, fd.rank() + 1.0), op=fd.Sum) for _ in range(3)]
    got = np.zeros((count, 3))
    for i in range(count):
        fd.send_async(np.full(3, i + 0.25 * fd.rank()), to, tag=i)
        fd.recv_async(got[i], source, tag=i)
        if i % 1000 == 0:
            gc.collect()
    last = np.zeros(1)
    handle = fd.recv_async(last, source)
    fd.send(np.ones(1), to)
    handle.wait()
    assert (got == np.arange(count)[:, None] + 0.25 * source).all()
    assert all(one.wait()[0] == fd.size() * (fd.size() + 1) / 2 for one in sums)


def test_views() -> None:
    """Into a row, into a column's copy, from a slice, from a tensor that requires grad."""
    to, source = neighbours()
    table = torch.zeros(4, 3)
    rows = [hvd.recv_async(row, source, tag=1) for row in table[1:3]]
    column = np.arange(12.0).reshape(4, 3) + fd.rank()
    for k in (0, 1):
        hvd.send(torch.from_numpy(column).float().t()[k, :3].requires_grad_(), to, tag=1)
    assert [handle.wait() for handle in rows] == [source] * 2
    assert table[1:3].tolist() == [[k + 3.0 * i + source for i in range(3)] for k in (0, 1)]
    assert table[0].tolist() == table[3].tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="contiguous"):
        hvd.recv(table[:, 0], source, tag=2)
    with pytest.raises(ValueError, match=rf"rank {to} refused: .*contiguous"):
        hvd.send(torch.zeros(4), to, tag=2)


def test_the_same_call_with_other_arrays() -> None:
    """What is prepared for one form is not used for another, nor across threads or peers."""
    to, source = neighbours()
    forms: list[Any] = [
        lambda i: np.full(3, i + 0.5 * fd.rank()),
        lambda i: np.full((2, 2), i + 0.5 * fd.rank(), np.float32),
        lambda i: torch.full((3,), i + 0.5 * fd.rank()),
        lambda i: torch.full((0,), 1.0),
        lambda i: torch.full((300, 2), i + 0.5 * fd.rank()).t(),
    ]
    for i in range(4):
        for form in forms:
            sent = form(i)
            got = form(0).copy() if isinstance(sent, np.ndarray) else form(0).contiguous()
            for name in (None, "named"):
                got *= 0
                handle = fd.recv_async(got, source, name=name)
                assert fd.send(sent, to, name=name) is None
                assert handle.wait() == source
                assert (got == i + 0.5 * source).all()
            anyone = fd.recv_async(got)
            fd.send(sent, to)
            assert anyone.wait() == source


@pytest.mark.parametrize("elements", [1, 300_000])
def test_both_send_first(elements: int) -> None:
    """A send may wait for its receive: this hangs, but not in silence; posted sends don't."""
    if fd.rank() > 1:
        return
    peer = 1 - fd.rank()
    x, y = np.full(elements, fd.rank() + 1.0), np.zeros(elements)
    early = fd.send_async(x, peer, tag=1)
    fd.recv(np.zeros(1), peer, tag=2) if fd.rank() else fd.send(np.zeros(1), peer, tag=2)
    with pytest.raises(fd.StallError, match=r"both send, and neither has a receive") as error:
        early.wait(timeout=0.5)
    MPI.COMM_WORLD.sendrecv(None, peer, source=peer)  # both have waited
    assert f"rank {peer} has posted send of rank {peer} to rank {fd.rank()} with tag 1" in str(
        error.value
    )
    fd.recv(y, peer, tag=1)
    early.wait()
    assert y[-1] == peer + 1
    late = fd.send_async(x, peer)
    fd.recv(y, peer)
    late.wait()


def test_to_oneself() -> None:
    x = np.ones(3)
    with pytest.raises(ValueError, match="to itself; copy the tensor"):
        fd.send(x, fd.rank())
    with pytest.raises(ValueError, match="to itself; copy the tensor"):
        fd.recv(x, fd.rank())


def test_two_threads_and_a_third_that_reduces() -> None:
    to, source = neighbours()
    failed = []

    def work(tag: int) -> None:
        try:
            for i in range(200):
                got = np.zeros(10 + 3000 * tag)
                handle = fd.recv_async(got, source, tag=tag)
                fd.send(np.full(len(got), i + tag + 0.5 * fd.rank()), to, tag=tag)
                handle.wait()
                assert got[0] == got[-1] == i + tag + 0.5 * source
        except BaseException as reason:
            failed.append(reason)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for i in range(100):
        assert fd.allreduce(np.full(500, fd.rank() + i), op=fd.Max)[0] == fd.size() - 1 + i
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.ranks(3)
def test_in_a_set_while_another_rank_has_joined() -> None:
    """Ranks are those in the set; a join of the world ends no messages in the set."""
    pair = fd.add_process_set([1, 2])
    got = np.zeros(2)
    if pair.included():
        own = pair.rank()
        assert own is not None
        for i in range(3):
            if own == 0:
                fd.send(np.full(2, i + 1.0), 1, process_set=pair, tag=i)
                fd.recv(got, 1, process_set=pair, tag=i)
                assert got.tolist() == [-1.0 - i] * 2
            else:
                assert fd.recv(got, process_set=pair, tag=i) == 0
                fd.send(-got, 0, process_set=pair, tag=i)
    fd.join()
    fd.remove_process_set(pair)
