# SPDX-License-Identifier: Apache-2.0
"""A signal handler or a finalizer may make calls at any moment of another call on its thread."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from farandole import elastic, runtime
from farandole.c10d import memory_in_use
from farandole.errors import HostsUpdatedInterrupt
from farandole.start.connection import Connection
from harness.moments import at_each_moment

X, Y = np.arange(6.0), np.full((7, 1, 2, 1, 3), 5.0)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


def reduced(kind: str, turn: int) -> None:
    for _ in range(3):  # the second call prepares, the third one repeats
        assert fd.allreduce(X, name=f"{kind} {turn}").tolist() == X.tolist()


def test_both_prepare_a_call() -> None:
    turns = itertools.count()
    program, handler = (lambda kind=kind: reduced(kind, next(turns)) for kind in "ab")
    assert at_each_moment(program, handler) > 100


def test_both_take_a_result() -> None:
    turns = itertools.count()

    def gathered(x: Any) -> None:
        assert np.array_equal(fd.allgather(x, name=f"gathered {next(turns)}"), x)

    assert at_each_moment(partial(gathered, X), partial(gathered, Y)) > 100


@pytest.mark.parametrize(
    "start",
    [
        lambda: fd.allgather_async(X),
        lambda: fd.allreduce_async(X),
        lambda: fd.grouped_allreduce_async([X, Y]),
    ],
    ids=["allgather", "allreduce", "group"],
)
def test_both_wait_for_one_call(start: Any) -> None:
    """The handler itself fails while the program takes the result, which is possible once."""
    handles: list[Any] = []

    def program() -> None:
        handles[:] = [start()]
        result = handles[0].wait()
        assert np.array_equal(result[0] if isinstance(result, list) else result, X)

    def handler() -> None:
        try:
            handles[0].wait()
        except ValueError as reason:
            assert "taken before" in str(reason)  # noqa: PT017

    handles[:] = [start()]
    assert at_each_moment(program, handler) > 20


def test_ctrl_c_comes_again_in_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    leave, causes = runtime._leave_core, list[str]()

    def leave_core(cause: str, limit: float | None = None) -> Exception | None:
        causes.append(cause)
        if len(causes) < 4:
            raise KeyboardInterrupt(f"number {len(causes)}")
        return leave(cause, limit)

    monkeypatch.setattr(runtime, "_leave_core", leave_core)
    with pytest.raises(KeyboardInterrupt, match="number 1"):
        fd.shutdown()
    assert causes == ["", *["KeyboardInterrupt: number 1"] * 3]
    assert not fd.is_initialized()
    fd.init()
    assert fd.allreduce(X, name="again").tolist() == X.tolist()


class Unproved:
    """A session that adds nothing to the messages."""

    proved, outgoing = True, bytearray()

    def send(self, message: bytes) -> None:
        self.outgoing += message


def test_ctrl_c_in_a_send_does_not_keep_later_messages() -> None:
    own, other = socket.socketpair()
    other.setblocking(False)
    session: Any = Unproved()
    connection = Connection(own, session, 1.0, 1.0)

    def program() -> None:
        with suppress(KeyboardInterrupt):
            connection.send(b"a")
        with suppress(KeyboardInterrupt):
            connection.send(b"b")
        trace = sys.gettrace()
        sys.settrace(None)
        connection.send(b"c")
        sys.settrace(trace)
        assert other.recv(100).endswith(b"c")

    def handler() -> None:
        raise KeyboardInterrupt

    with own, other:
        assert at_each_moment(program, handler) > 5


class Ended:
    """A work that has ended, for which nobody waits."""

    numbers: tuple[int, ...] = ()
    devices: tuple[Any, ...] = ()

    def outcome(self) -> None:
        return None


def test_ctrl_c_keeps_no_tensor_in_use() -> None:
    x, y, z = torch.ones(4), torch.ones(5), torch.ones(6)

    def program() -> None:
        work: Any = Ended()
        with suppress(KeyboardInterrupt):
            memory_in_use.add(work, [x, y], [z])
            memory_in_use.remove(work)
        trace = sys.gettrace()
        sys.settrace(None)
        memory_in_use.sweep()
        assert (memory_in_use._uses, memory_in_use.count()) == ([], 0)
        sys.settrace(trace)

    def handler() -> None:
        raise KeyboardInterrupt

    assert at_each_moment(program, handler) > 20


def test_shutdown_does_not_repeat_an_error_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    leave, attempts = runtime._leave_core, list[str]()

    def leave_core(cause: str, limit: float | None = None) -> Exception | None:
        attempts.append(cause)
        if len(attempts) < 3:
            raise MemoryError(f"number {len(attempts)}")
        return leave(cause, limit)

    monkeypatch.setattr(runtime, "_leave_core", leave_core)
    with pytest.raises(MemoryError, match="number 2"):
        fd.shutdown()
    assert fd.is_initialized()  # so that the program can repeat it
    fd.shutdown()
    assert not fd.is_initialized()
    fd.init()


def test_hosts_change_again() -> None:
    state = elastic.ObjectState(epoch=0)

    def added() -> None:
        state.on_hosts_updated(1.0, 2)

    def reset() -> None:
        state.on_hosts_updated(1.0, 1)
        state.on_reset()

    assert at_each_moment(reset, added) > 2
    state.on_hosts_updated(1.0, 1)
    assert at_each_moment(lambda: state.on_hosts_updated(1.0, 1), added) > 0
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.check_host_updates()
    assert not interrupt.value.skip_sync  # as it would be after removals only
