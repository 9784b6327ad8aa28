# SPDX-License-Identifier: Apache-2.0
"""Who listens where a rank's agent or rendezvous should be, and who calls them as another user
or as no rank: ranks are told of it in time, and strangers gain nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import farandole
from farandole.launch.result_server import ResultServer
from farandole.start import agent_client, sockets
from farandole.start.connection import open_connection
from farandole.start.rendezvous import RendezvousServer, connect, exchange
from harness.commands import needs_root
from harness.process import PATIENCE


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A path of sockets that a stranger can enter, in place of the one that no other user can."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setattr(sockets, "path_of", lambda: f"{folder}/here")
        yield f"{folder}/here"


STRANGER = """
import os, socket, sys
os.umask(0)
os.setuid(65534)
end = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "listen":
    end.bind(sys.argv[1])
    end.listen()
    print("here", flush=True)
    caller, _ = end.accept()
    print(len(caller.recv(100)))
else:
    end.connect(sys.argv[1])
    print("here", flush=True)
    print(end.recv(100))
"""


def of_another_user(stack: ExitStack, name: str, role: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER, name, role], stdout=subprocess.PIPE, text=True
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def told(process: subprocess.Popen[str]) -> str:
    """What else it prints."""
    assert process.stdout is not None
    return process.stdout.read()


@needs_root
def test_another_user_listens_in_the_place_of_the_agent(
    stack: ExitStack, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = of_another_user(stack, place, "listen")
    monkeypatch.setenv(agent_client.AGENT, f"{place} 0 1.1")
    with pytest.raises(farandole.LibraryError, match="another user's process"):
        agent_client.connect()
    assert told(stranger) == "0\n", "it is told nothing"


@needs_root
def test_another_user_calls(stack: ExitStack, place: str) -> None:
    door = stack.enter_context(ResultServer(1, b"work", True))
    assert door.address == place
    Path(place).chmod(0o777)
    stranger = of_another_user(stack, place, "call")
    assert told(stranger) == "b''\n"
    with open_connection(door.address, bytes.fromhex(door.key)) as rank:
        assert rank.receive(PATIENCE) == b"work"


@needs_root
def test_another_user_at_the_rendezvous(stack: ExitStack, place: str) -> None:
    """At both ends."""
    meeting = stack.enter_context(RendezvousServer(1))
    Path(place).chmod(0o777)
    stranger = of_another_user(stack, place, "call")
    assert told(stranger) == "b''\n"
    with connect(meeting.address, 0) as rank:
        assert exchange(rank, b"mine") == [b"mine"]
    of_another_user(stack, f"{place}-2", "listen")
    with pytest.raises(ConnectionError, match="another user's process"):
        connect(f"{place}-2", 0)


@pytest.mark.parametrize("number", [1, 2**64 - 1])
def test_what_is_no_rank_at_the_rendezvous(stack: ExitStack, number: int) -> None:
    """It is sent away, and the ranks go on."""
    meeting = stack.enter_context(RendezvousServer(1))
    rank = stack.enter_context(connect(meeting.address, 0))
    with pytest.raises(ConnectionError, match=r"hung up|reset"):
        open_connection(meeting.address, b"", number)
    assert exchange(rank, b"mine") == [b"mine"]
