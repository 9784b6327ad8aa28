# SPDX-License-Identifier: Apache-2.0
"""Connections end when their process ends or closes them, though a forked child of it lives on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.start.connection import Connection
from farandole.start.rendezvous import RendezvousServer, connect, exchange

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def sockets() -> set[str]:
    """This process's."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return {target for target in found if target.startswith("socket:")}


@contextlib.contextmanager
def child() -> Iterator[set[str]]:
    """The sockets of a forked child, while it lives."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        its.send("\n".join(sockets()).encode())
        its.recv(1)
        os._exit(0)
    its.close()
    try:
        yield set(ours.recv(1 << 16).decode().split("\n"))
    finally:
        ours.close()
        os.waitpid(pid, 0)


@contextlib.contextmanager
def two_ranks() -> Iterator[tuple[RendezvousServer, list[Connection]]]:
    """At a rendezvous, once both have exchanged something."""
    with RendezvousServer(2) as server:
        lines = [connect(server.address, rank) for rank in range(2)]
        lines[0].send(json.dumps(b"here".hex()).encode())
        assert exchange(lines[1], b"there") == [b"here", b"there"]
        assert lines[0].receive(60)
        yield server, lines
        for line in lines:
            line.close()


def test_a_rank_that_hangs_up() -> None:
    with two_ranks() as (_, lines), child():
        lines[1].close()
        with pytest.raises(ConnectionError, match="rank 1 has ended or left: see its own"):
            exchange(lines[0], b"data", 60)


def test_a_server_that_ends() -> None:
    with two_ranks() as (server, lines), child():
        server.close()
        with pytest.raises(EOFError):
            lines[0].receive(60)


def test_a_child_has_none_of_them() -> None:
    before = sockets()
    with two_ranks():
        assert len(sockets() - before) >= 5  # listener, two lines, two guests
        with child() as inherited:
            assert not inherited & (sockets() - before)
