# SPDX-License-Identifier: Apache-2.0
"""send and recv between members: rings, pairs, random traffic, and what is wrong with a message."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import farandole as fd
from harness.arrays import DTYPES, Array, assert_same, data

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(autouse=True)
def _still_usable() -> Iterator[None]:
    yield
    assert fd.allreduce(np.full(2, fd.rank() + 1.0), op=fd.Max).tolist() == [fd.size()] * 2
    to, source = neighbours()
    got = np.zeros(1)
    handle = fd.recv_async(got, source, tag=2**62)
    fd.send(np.full(1, fd.rank() + 1.0), to, tag=2**62)
    assert handle.wait() == source
    assert got[0] == source + 1


def neighbours(step: int = 1) -> tuple[int, int]:
    """Whom a rank sends to in a ring, and from whom it receives."""
    return (fd.rank() + step) % fd.size(), (fd.rank() - step) % fd.size()


def message(sender: int, receiver: int, elements: int, salt: int = 0) -> Array:
    return data(sender, (elements,), "float64", salt=receiver + 10 * salt)


def peers() -> list[int]:
    return [rank for rank in range(fd.size()) if rank != fd.rank()]


# ---- traffic that is right


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes(dtype: str) -> None:
    to, source = neighbours()
    got = np.zeros((3, 4), dtype)
    handle = fd.recv_async(got, source)
    fd.send(data(fd.rank(), (2, 6), dtype).reshape(6, 2), to)
    handle.wait()
    assert_same(got, data(source, (2, 6), dtype).reshape(3, 4))


def test_from_any_rank() -> None:
    if fd.rank() > 0:
        fd.send(np.full(3, float(fd.rank())), 0, tag=fd.rank() % 2)
        return fd.send(message(fd.rank(), 0, 50_000), 0, tag=7)
    for tag in (1, 0):
        expected = {rank for rank in peers() if rank % 2 == tag}
        while expected:
            got = np.zeros(3)
            source = fd.recv(got, tag=tag)
            expected.remove(source)
            assert got.tolist() == [source] * 3
    sources = []
    for _ in peers():
        large = np.zeros(50_000)
        sources.append(fd.recv(large, None, tag=7))
        assert_same(large, message(sources[-1], 0, 50_000))
    assert sorted(sources) == peers()
    return None


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_beside_collectives(seed: int) -> None:
    """All ranks draw the same plan; each makes its own ends of it, in an order of its own."""
    plan = random.Random(seed)
    messages = []
    for i in range(120):
        sender, receiver = plan.sample(range(fd.size()), 2)
        elements = plan.choice([0, 1, 100, 130, 255, 257, 5_000, 80_000])
        elements = 1_310_723 if i % 40 == 7 else elements
        messages.append((i, sender, receiver, plan.randrange(4), elements))
    mine = random.Random(100 * seed + fd.rank())
    expected: dict[tuple[str, int, int], list[Any]] = defaultdict(list)
    for i, sender, receiver, tag, elements in messages:
        if fd.rank() == sender:
            expected["send", receiver, tag].append((i, elements))
        if fd.rank() == receiver:
            expected["recv", sender, tag].append((i, elements))
    sums = iter([fd.allreduce_async(np.full(n, fd.rank()), op=fd.Sum) for n in (3, 90_000)])
    handles, gots = [], []
    while lines := [key for key, left in expected.items() if left]:
        what, peer, tag = key = mine.choice(lines)
        i, elements = expected[key].pop(0)
        if what == "send":
            sent = message(fd.rank(), peer, elements, salt=i)
            handles.append(fd.send_async(sent, peer, tag=tag, name=f"message {i}"))
        else:
            gots.append((np.zeros(elements), peer, i))
            handles.append(fd.recv_async(gots[-1][0], peer, tag=tag))
    mine.shuffle(handles)
    for handle in handles:
        handle.wait(timeout=60)
    for got, peer, i in gots:
        assert_same(got, message(peer, fd.rank(), len(got), salt=i))
    assert all(next(sums).wait()[0] == sum(range(fd.size())) for _ in range(2))


def test_threads() -> None:
    def work(tag: int) -> int:
        to, source = neighbours()
        for i in range(10):
            got = np.zeros(1000 * tag + 1)
            handle = fd.recv_async(got, source, tag=tag)
            fd.send(message(fd.rank(), to, len(got), salt=i), to, tag=tag)
            handle.wait()
            assert_same(got, message(source, fd.rank(), len(got), salt=i))
        return tag

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]


@pytest.mark.ranks(3, 4)
def test_in_process_sets() -> None:
    """Ranks are those in the set; messages of two sets never meet."""
    low, high = fd.add_process_set([0, 1]), fd.add_process_set([1, 2])
    gots = {}
    handles = []
    for number, process_set in enumerate((low, high, fd.global_process_set)):
        if not process_set.included():
            continue
        own = process_set.rank()
        if own == 0:
            handles.append(fd.send_async(np.full(9, number), 1, process_set=process_set))
        elif own == 1:
            gots[number] = np.zeros(9, int)
            receive = fd.recv_async(gots[number], process_set=process_set)
            handles.append(receive.map(lambda source: source == 0))
    assert all(handle.wait() in (None, True) for handle in handles)
    assert all(got.tolist() == [number] * 9 for number, got in gots.items())
    if low.included():
        with pytest.raises(ValueError, match="destination is 2: the process set has ranks 0 to 1"):
            fd.send(np.ones(1), 2, process_set=low)
    else:
        with pytest.raises(ValueError, match="is not in process set"):
            fd.send(np.ones(1), 1, process_set=low)
    fd.barrier()
    assert fd.remove_process_set(low)
    assert fd.remove_process_set(high)


# ---- a stranger's use


@pytest.mark.parametrize(("count", "elements"), [(6, 100_000), (5000, 3)])
def test_messages_that_nobody_waits_for(count: int, elements: int) -> None:
    """All handles and sent arrays are dropped at once. Every tag of the many is new."""
    to, source = neighbours()
    sums = [fd.allreduce_async(np.full(70_000, fd.rank() + 1.0), op=fd.Sum) for _ in range(3)]
    got, sent = np.zeros((count, elements)), np.arange(elements) * 1e-3
    for i in range(count):
        tag = i if count > 10 else 0
        fd.send_async(sent + i + 0.25 * fd.rank(), to, tag=tag)
        fd.recv_async(got[i], source, tag=tag)
        if i % 1000 == 0 or count < 10:
            gc.collect()
    last = np.zeros(elements)
    handle = fd.recv_async(last, source)  # after those, which went the same way; a small one may
    fd.send(np.ones(elements), to)  # overtake them
    handle.wait()
    assert (got == sent + np.arange(count)[:, None] + 0.25 * source).all()
    assert all(one.wait()[0] == fd.size() * (fd.size() + 1) / 2 for one in sums)


def test_a_time_out_says_who_is_missing_and_can_be_waited_for_again() -> None:
    MPI.COMM_WORLD.Barrier()
    to, source = neighbours()
    got = np.zeros(5)
    handle = fd.recv_async(got, source, tag=3)
    with pytest.raises(
        fd.StallError, match=rf"from rank {source} with tag 3.*rank {source} missing"
    ) as late:
        handle.wait(timeout=0.3)
    assert late.value.under_way
    with pytest.raises(fd.StallError, match=f"rank {to} missing"):
        fd.send(np.ones(4), to, tag=4, timeout=0.3)
    MPI.COMM_WORLD.Barrier()
    fd.send(np.full(5, 1.0 + fd.rank()), to, tag=3)
    assert handle.wait() == source
    assert got.tolist() == [1.0 + source] * 5
    assert fd.recv(np.zeros(4), source, tag=4) == source  # the late send was under way, too


# ---- what is wrong


@pytest.mark.parametrize(
    ("sent", "received", "says"),
    [
        (np.ones(4), np.ones(3), "has 4 elements of float64 (32 bytes)"),
        (np.ones(3), np.ones(400_000), "has 400000 elements of float64 (3200000 bytes)"),
        (np.ones(300_000), np.ones(1), "has 300000 elements of float64"),
        (np.ones(4), np.ones(4, "float32"), "has 4 elements of float32 (16 bytes)"),
        (np.ones(0), np.ones(1), "has 0 elements"),
    ],
)
def test_ends_that_disagree(sent: Array, received: Array, says: str) -> None:
    to, source = neighbours()
    send = fd.send_async(sent, to, tag=5, name="odd")
    recv = fd.recv_async(received, source, tag=5)
    with pytest.raises(fd.MismatchError) as of_send:
        send.wait()
    with pytest.raises(fd.MismatchError) as of_recv:
        recv.wait()
    assert f"send 'odd' of rank {fd.rank()} to rank {to} with tag 5" in str(of_send.value)
    assert f"receive of rank {fd.rank()} from rank {source} with tag 5" in str(of_recv.value)
    for error in (of_send.value, of_recv.value):
        assert says in str(error)


WRONG = {
    "no array": (None, {}, TypeError, "NoneType"),
    "itself": (np.ones(1), {"destination": "own"}, ValueError, "send to itself; copy the tensor"),
    "no such rank": (np.ones(1), {"destination": 99}, ValueError, "destination is 99"),
    "a text": (np.ones(1), {"destination": "0"}, TypeError, "destination is '0'"),
    "negative": (np.ones(1), {"destination": -1}, ValueError, "destination is -1"),
    "negative tag": (np.ones(1), {"tag": -1}, ValueError, "tag is -1"),
    "tag of text": (np.ones(1), {"tag": "a"}, TypeError, "tag is 'a'"),
    "long tag": (np.ones(1), {"tag": 2**63}, ValueError, "tag is 9223372036854775808"),
    "no set": (np.ones(1), {"process_set": 3}, TypeError, "process_set is 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    tensor, options, error, says = WRONG[case]
    given: dict[str, Any] = {"destination": neighbours()[0], **options}
    if given["destination"] == "own":
        given["destination"] = fd.rank()
    to, source = neighbours()
    told = case == "no array"  # the peer hears of it; else nobody knows whom to tell
    with pytest.raises(error, match=says):
        fd.send(tensor, **given)
    if told:
        with pytest.raises(TypeError, match=rf"rank {source} refused"):
            fd.recv(np.ones(1), source)
    given.pop("destination")
    given["source"] = options.get("destination", source)
    if given["source"] == "own":
        given["source"] = fd.rank()
    with pytest.raises(error, match=says.replace("destination", "source")):
        fd.recv(tensor, **given)
    if told:
        with pytest.raises(TypeError, match=rf"rank {to} refused"):
            fd.send(np.ones(1), to)


@pytest.mark.parametrize("wrong", ["read-only", "strided"])
def test_a_refused_receive_fails_the_send(wrong: str) -> None:
    to, source = neighbours()
    got = np.zeros(8)[::2] if wrong == "strided" else np.zeros(4)
    got.flags.writeable = wrong == "strided"
    with pytest.raises(ValueError, match=r"contiguous|read-only|writable|writeable"):
        fd.recv(got, source, tag=1)
    with pytest.raises(ValueError, match=rf"rank {to} refused"):
        fd.send(np.ones(4), to, tag=1)


def test_a_rank_that_joined() -> None:
    last = fd.size() - 1
    if fd.rank() == last:
        early = fd.send_async(np.full(3, 7.0), 0, tag=1)
        fd.join()
        return early.wait()
    if fd.rank() == 0:
        receive = fd.recv_async(np.zeros(3), last, tag=2)
        with pytest.raises(fd.PeerError, match=f"receive of rank 0 from rank {last}.* joined"):
            receive.wait()
        with pytest.raises(fd.PeerError, match=f"rank {last} joined"):
            fd.send(np.zeros(300_000), last)
        got = np.zeros(3)
        assert fd.recv(got, last, tag=1) == last  # it was sent before
        assert got.tolist() == [7.0] * 3
    fd.join()
    return None


def test_shutdown_with_messages_under_way() -> None:
    to, source = neighbours()
    got = np.zeros(100_000)
    never = [fd.recv_async(got, source, tag=11), fd.send_async(got + 1, to, tag=12)]
    fd.shutdown()
    for handle in never:
        with pytest.raises((fd.ShutdownError, fd.PeerError)):
            handle.wait()
    with pytest.raises(fd.ShutdownError):
        fd.send(got, to)
    MPI.COMM_WORLD.Barrier()
    fd.init()


# ---- as people use them who have read no documentation


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
    with pytest.raises(fd.StallError) as error:
        early.wait(timeout=0.5)
    MPI.COMM_WORLD.sendrecv(None, peer, source=peer)  # both have waited
    its = f"rank {peer} waits in send of rank {peer} to rank {fd.rank()} with tag 1, which rank "
    assert f"{its}{fd.rank()} has not called" in str(error.value)
    fd.recv(y, peer, tag=1)
    early.wait()
    assert y[-1] == peer + 1
    late = fd.send_async(x, peer)
    fd.recv(y, peer)
    late.wait()


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
