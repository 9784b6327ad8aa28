# SPDX-License-Identifier: Apache-2.0
"""ParameterServer: what is pushed arrives once, and who may read when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import farandole as hvd
from farandole.extras.parameter_server import shard, worker

ROWS, WIDTH = 23, 3
several = pytest.mark.ranks(2, 3, 4)
INF = float("inf")


def drawn(rank: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows, some of them twice, and their values."""
    generator = np.random.default_rng(100 * step + rank)
    rows = generator.integers(0, ROWS, 5 + rank)
    return rows, generator.integers(-9, 9, (len(rows), WIDTH)).astype(float)


def total(steps: int) -> NDArray[np.float64]:
    table = np.zeros((ROWS, WIDTH))
    for step in range(steps):
        for rank in range(hvd.size()):
            np.add.at(table, *drawn(rank, step))
    return table


def signal(to: int) -> None:
    hvd.send(np.zeros(1), destination=to, tag=77)


def await_signal(source: int) -> None:
    hvd.recv(np.zeros(1), source=source, tag=77)


@pytest.mark.parametrize("idle", [3.0, 0.0005], ids=["busy", "idle"])
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_all_that_is_pushed_arrives_once(
    staleness: int | None, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "heartbeat_seconds", lambda: idle)
    with hvd.ParameterServer((ROWS, WIDTH), "float64", staleness=staleness) as server:
        held = server._shard._values.nbytes  # each rank has its part of the table only
        assert sum(hvd.allgather_object(held)) == ROWS * WIDTH * 8
        assert held <= (ROWS // hvd.size() + 1) * WIDTH * 8
        for step in range(6):
            server.push(*drawn(hvd.rank(), step))
            assert server.clock() == step + 1
            server.pull(drawn(hvd.rank(), step)[0])
        hvd.barrier()
        np.testing.assert_array_equal(server.pull(), total(6))


@several
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_pull_is_never_too_old(staleness: int) -> None:
    """At clock c it has all pushes before clock c - staleness, and this rank's own ones."""
    n, own = hvd.size(), hvd.rank()
    with hvd.ParameterServer((n, 2), "int64", staleness=staleness) as server:
        for clock in range(12):
            seen = server.pull()
            assert min(server.clocks) >= clock - staleness
            for rank in range(n):
                least = clock if rank == own else clock - staleness
                assert (seen[rank] >= least).all(), (clock, seen)
            server.push([own], np.ones((1, 2), int))
            server.clock()


@several
def test_a_fast_rank_waits_for_the_slow_one_no_earlier_than_it_must() -> None:
    with hvd.ParameterServer((5, 1), staleness=2) as server:
        if hvd.rank() == 1:
            await_signal(0)  # rank 0 is 2 clocks ahead, and has read
            server.push([4], [[7.0]])
            server.clock()
        else:
            server.clock()
            server.clock()
            server.pull()
            if hvd.rank() == 0:
                signal(1)
            server.clock()
            assert server.pull()[4, 0] == 7.0  # it has waited for rank 1


@several
def test_without_a_bound_nobody_waits() -> None:
    with hvd.ParameterServer((5, 1), staleness=None) as server:
        if hvd.rank() == 1:
            await_signal(0)
        for _ in range(20):
            server.push(None, np.ones((5, 1)))
            server.clock()
            server.pull()
        if hvd.rank() == 0:
            signal(1)
        hvd.barrier()
        np.testing.assert_array_equal(server.pull(), np.full((5, 1), 20.0 * hvd.size()))


def test_first_values_and_updates_of_ones_own() -> None:
    def first(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return rows[:, None] * np.ones(WIDTH)

    with hvd.ParameterServer(
        (ROWS, WIDTH), "float32", initial=first, update=lambda old, grad: old - 0.5 * grad
    ) as server:
        start = server.pull()
        assert start.dtype == np.float32
        np.testing.assert_array_equal(start, first(np.arange(ROWS)))
        hvd.barrier()
        server.push([3, 3, 5], np.ones((3, WIDTH)))
        server.clock()
        rows = server.pull([5, 3, 5, 0])
        for row, value in zip(rows, (5 - 0.5 * hvd.size(), 3 - hvd.size()), strict=False):
            np.testing.assert_array_equal(row, np.full(WIDTH, value, np.float32))
        np.testing.assert_array_equal(rows[0], rows[2])
        assert server.pull([]).shape == (0, WIDTH)


@pytest.mark.ranks(3, 4)
def test_one_of_a_set_beside_one_of_the_world() -> None:
    """Their messages are apart, though both begin with the same tag."""
    pair = hvd.add_process_set([0, hvd.size() - 1])
    with hvd.ParameterServer((6, 1), "int64") as everyones:
        everyones.push(None, np.full((6, 1), hvd.rank() + 1))
        if not pair.included():
            with pytest.raises(ValueError, match=rf"rank {hvd.rank()} is not in"):
                hvd.ParameterServer((5, 1), process_set=pair)
        else:
            with hvd.ParameterServer((6, 1), "int64", process_set=pair) as ours:
                ours.push(None, np.full((6, 1), 100 * (hvd.rank() + 1)))
                ours.clock()
                assert (ours.pull() == 100 * (1 + hvd.size())).all()
                assert len(ours.clocks) == 2
        everyones.clock()
        assert (everyones.pull() == hvd.size() * (hvd.size() + 1) // 2).all()
    hvd.remove_process_set(pair)


@several
def test_raised_between_push_and_clock() -> None:
    """What is pushed counts; the others neither wait nor fail."""
    last = hvd.size() - 1

    def work() -> None:
        with hvd.ParameterServer((7, 2), "int64", staleness=0) as server:
            for step in range(3):
                server.push(None, np.full((7, 2), hvd.rank() + 1))
                if hvd.rank() == last and step == 1:
                    raise ZeroDivisionError
                server.clock()
                table = server.pull()
            assert (table == 3 * (last * (last + 1) // 2) + 2 * (last + 1)).all()

    if hvd.rank() == last:
        with pytest.raises(ZeroDivisionError):
            work()
    else:
        work()
    hvd.barrier()


@several
def test_beside_collectives_and_messages_of_the_users_own() -> None:
    """Three epochs, each with a server of its own, whose table goes on in the next one."""
    table = np.zeros((6, 2))
    for epoch in range(3):
        with hvd.ParameterServer((6, 2), "float64", initial=table.__getitem__) as server:
            for step in range(4):
                handle = hvd.allreduce_async(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
                server.push([step, 5], np.full((2, 2), hvd.rank() + 1.0))
                server.clock()
                hvd.send_async(np.ones(2), (hvd.rank() + 1) % hvd.size(), tag=step)
                server.pull([step])
                hvd.recv(np.zeros(2), tag=step)
                assert handle.wait()[0] == hvd.size() * (hvd.size() + 1) / 2
            hvd.barrier()
            table = server.pull()
        each = (epoch + 1) * hvd.size() * (hvd.size() + 1) / 2
        assert table[:, 0].tolist() == [each] * 4 + [0, 4 * each]


class Interrupt:
    """Raises KeyboardInterrupt once, just before or after a module's n-th message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int, after: bool) -> None:
        self.left, self.after = nth, after
        for name in ("send_async", "recv_async"):
            function = partial(self._call, getattr(worker, name))
            monkeypatch.setattr(worker, name, function)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1 and not self.after:
            raise KeyboardInterrupt
        handle = function(*args, **kwargs)
        if self.left == -1:
            raise KeyboardInterrupt
        return handle


@several
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["push", "pull", "clock"])
def test_a_call_that_is_interrupted_holds_up_nobody(
    call: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of its messages: servers go on, and that worker has left."""
    n, last = hvd.size(), hvd.size() - 1
    messages = {"push": 2 * last, "pull": 3 * last, "clock": last}[call]
    arguments = {"push": (None, np.ones((n, 1))), "pull": (), "clock": ()}[call]
    for nth in range(messages):
        with hvd.ParameterServer((n, 1), "int64") as server, monkeypatch.context() as patched:
            for _ in range(2):
                server.push([hvd.rank()], np.ones((1, 1)))
                server.clock()
                server.pull()
            if hvd.rank() == last:
                Interrupt(patched, nth, after)
                with pytest.raises(KeyboardInterrupt):
                    getattr(server, call)(*arguments)
                with pytest.raises(ValueError, match="KeyboardInterrupt interrupted a call; make"):
                    server.push(None, np.ones((n, 1)))
            else:
                server.push([hvd.rank()], np.ones((1, 1)))
                server.clock()
                seen = server.pull()[:, 0]  # the last one's push has reached some rows
                assert (seen[:last] >= 3).all()
                assert (seen <= 4).all()
                assert server.clocks[last] == INF or call == "clock"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", [-1, ROWS])
def test_a_place_outside_of_the_table_is_refused(place: int) -> None:
    """A relay can change a request's bytes between two hosts. NumPy takes -1 for the last row."""
    values = np.zeros((ROWS, WIDTH))
    part = shard.Shard(values, lambda old, new: old + new, 2, None)
    with pytest.raises(hvd.PeerError, match="was altered on its way"):
        part.check_places(np.array([0, place]))
    server = hvd.ParameterServer((ROWS, WIDTH), "float64")
    if hvd.rank() == 0:
        server._ask(1, shard.PUSH, np.array([place]), np.ones((1, WIDTH)))

    def hear() -> None:
        while True:
            server.pull([1])

    with pytest.raises(hvd.PeerError, match=r"was altered|no longer serves"):
        hear()
    with pytest.raises(hvd.PeerError):
        server.close()


@several
def test_a_rank_without_a_thread_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks get an error at once instead of waiting for its clock."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    last = hvd.size() - 1
    if hvd.rank() == last:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                hvd.ParameterServer((ROWS, WIDTH))
    else:
        with (
            pytest.raises(hvd.FarandoleError, match=f"rank {last}"),
            hvd.ParameterServer((ROWS, WIDTH)) as server,
        ):
            server.pull()
    hvd.barrier()
    with hvd.ParameterServer((ROWS, WIDTH)) as server:
        server.push(*drawn(hvd.rank(), 0))
