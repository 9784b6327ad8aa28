# SPDX-License-Identifier: Apache-2.0
"""The server of metrics: it ends with connections open, and a forked child gives its port up."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.request
from types import SimpleNamespace

import pytest

from farandole.observe import scrapes
from farandole.observe.scrapes import ScrapeServer


def text() -> str:
    return "numbers\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_an_answer() -> None:
    port = free_port()
    server = ScrapeServer("127.0.0.1", port, text)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/x?rank=3", timeout=30) as answer:
        assert answer.read() == b"numbers\n"
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    with pytest.raises(OSError, match="in use"):
        ScrapeServer("127.0.0.1", port, text)
    server.close()


def test_many_readers_cost_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is made once a second, however many read it: making it takes the rank's time."""
    now, made = [100.0], list[float]()
    monkeypatch.setattr(scrapes, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def page() -> str:
        made.append(now[0])
        return f"{len(made)}\n"

    port = free_port()
    server = ScrapeServer("127.0.0.1", port, page)

    def read() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            return bytes(answer.read())

    assert {read() for _ in range(50)} == {b"1\n"}
    now[0] = 100.75
    assert read() == b"1\n"
    now[0] = 101.25
    assert {read() for _ in range(50)} == {b"2\n"}
    assert made == [100.0, 101.25]
    server.close()


@pytest.mark.filterwarnings("error")
def test_it_ends_with_connections_open() -> None:
    """And at once, even before it has begun."""
    port = free_port()
    before = threading.active_count()
    ScrapeServer("127.0.0.1", port, text).close()
    server = ScrapeServer("127.0.0.1", port, text)
    strangers = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(9)]
    assert strangers[0].recv(1) == b"", "the newest 8 stay"
    server.close()
    assert threading.active_count() == before
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    ScrapeServer("127.0.0.1", port, text).close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gives_the_port_up() -> None:
    port = free_port()
    server = ScrapeServer("127.0.0.1", port, text)
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        its.recv(1)
        os._exit(0)
    server.close()
    ScrapeServer("127.0.0.1", port, text).close()
    mine.send(b"!")
    assert os.waitpid(child, 0)[1] == 0
    mine.close()
    its.close()
