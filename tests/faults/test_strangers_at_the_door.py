# SPDX-License-Identifier: Apache-2.0
"""Strangers at the doors of farandole.run() and the supervisor, and between a rank and its door:
they gain nothing, and the ranks are served. tests/single/test_session.py changes single bits."""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from farandole.launch.result_server import Outcome, ResultServer
from farandole.launch.supervisor import _AgentListener
from farandole.membership.messages import AgentStatus, encode
from farandole.start import connection, server
from farandole.start.connection import open_connection
from farandole.start.server import Client, Server
from farandole.start.session import Session
from harness.process import PATIENCE


class Marker:
    """What a stranger wants unpickled: it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Marker]:
    made = Marker(tmp_path / "marker")
    yield made
    assert not made.path.exists(), "a stranger's code has run"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def at_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets callers here use TCP: else they go by the door's Unix socket."""
    monkeypatch.setattr(connection, "_is_own", lambda family, number: False)


# ---- between a rank and its door


class Relay:
    """Listens at an address that the rank believes to be the door's, as another user could on an
    address that both hosts have. Passes all on until both ends are content; then it speaks."""

    def __init__(self, port: int, to_door: bytes, to_rank: bytes) -> None:
        self._port, self._words = port, (to_door, to_rank)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.done = threading.Event()  # the door has hung up on it
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        rank, _ = self._listener.accept()
        door = socket.create_connection(("127.0.0.1", self._port))
        self._ends = [rank, door]
        threading.Thread(target=self._pump, args=(door, rank), daemon=True).start()
        self._pump(rank, door)

    def _pump(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
        if source is self._ends[1]:
            self.done.set()

    def speak(self) -> None:
        """To both, in the name of the other."""
        for end, words in zip(reversed(self._ends), self._words, strict=True):
            with suppress(OSError):
                end.sendall(words)

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            end.close()


def old_frame(pickled: bytes) -> bytes:
    """A message of multiprocessing.connection."""
    return struct.pack("!i", len(pickled)) + pickled + bytes(32)


def new_frame(pickled: bytes) -> bytes:
    """One of a session, with MACs that the stranger has to guess."""
    return struct.pack("!Q", len(pickled)) + bytes(32) + pickled + bytes(32)


class Hears:
    """A supervisor that notes what agents say."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.heard: list[object] = []

    def welcome(self, client: Client) -> None:
        self.heard.append("came")

    def hear(self, client: Client, status: AgentStatus) -> None:
        self.heard.append(status)

    def lose(self, client: Client) -> None:
        self.heard.append("gone")

    def next(self) -> object:
        self.events.get(timeout=PATIENCE)()
        return self.heard[-1]


@pytest.mark.parametrize("frame", [old_frame, new_frame])
def test_a_relay_between_an_agent_and_its_supervisor(
    stack: ExitStack,
    marker: Marker,
    monkeypatch: pytest.MonkeyPatch,
    frame: Callable[[bytes], bytes],
) -> None:
    at_own_addresses(monkeypatch)
    hears = Hears()
    door = stack.enter_context(_AgentListener(False, hears))  # type: ignore[arg-type]
    words = frame(pickle.dumps(marker))
    relay = Relay(port_of(door.address), words, words)
    stack.callback(relay.close)
    agent = stack.enter_context(open_connection(relay.address, bytes.fromhex(door.key)))
    assert hears.next() == "came"
    status = AgentStatus("a", 1, "a", 2, ())
    agent.send(json.dumps(["status", encode(status)]).encode())
    assert hears.next() == status, "a relay that changes nothing is no better than a wire"
    relay.speak()
    assert hears.next() == "gone", "it hangs up, and nothing has been heard"
    with pytest.raises((OSError, EOFError)):
        agent.receive(PATIENCE)


@pytest.mark.parametrize("frame", [old_frame, new_frame])
def test_a_relay_between_a_rank_and_its_work(
    stack: ExitStack,
    marker: Marker,
    monkeypatch: pytest.MonkeyPatch,
    frame: Callable[[bytes], bytes],
) -> None:
    """Of farandole.run(), whose work and results are pickled."""
    at_own_addresses(monkeypatch)
    door = stack.enter_context(ResultServer(1, b"work", False))
    result = frame(Outcome(pickle.dumps(marker)).encode())
    relay = Relay(port_of(door.address), result, frame(pickle.dumps(marker)))
    stack.callback(relay.close)
    rank = stack.enter_context(open_connection(relay.address, bytes.fromhex(door.key)))
    assert rank.receive(PATIENCE) == b"work"
    relay.speak()
    assert relay.done.wait(PATIENCE)
    with pytest.raises((OSError, EOFError)):
        rank.receive(PATIENCE)
    assert not door.outcomes


def test_own_addresses_are_skipped() -> None:
    """Another user may listen there: the door of this host is at its Unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"/nowhere/nobody,127.0.0.1:{stranger.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: it is this host's own address"):
            open_connection(address, bytes(32))
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_no_door_offers_the_hosts_own_loopback() -> None:
    with ResultServer(1, b"", False) as door:
        places = door.address.rpartition(":")[0].split(",")
        assert places[0].startswith("/tmp/farandole-")
        assert not [place for place in places if place.startswith(("127.", "localhost"))]


# ---- who says nothing, or the wrong thing


def silent(stack: ExitStack, address: str, count: int) -> list[socket.socket]:
    """Strangers who connect and wait."""
    where = ("127.0.0.1", port_of(address))
    return [stack.enter_context(socket.create_connection(where)) for _ in range(count)]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fetch(address: str, key: str, rank: int) -> bytes:
    """What a rank's work is."""
    with open_connection(address, bytes.fromhex(key), rank) as there:
        return there.receive(PATIENCE)


def test_a_flood_of_silent_strangers(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and descriptors have a bound, and every rank is served by TCP."""
    at_own_addresses(monkeypatch)
    door = stack.enter_context(ResultServer(2, b"work", False))
    threads, files = threading.active_count(), descriptors()
    place = f"127.0.0.1:{port_of(door.address)}"
    strangers = silent(stack, door.address, 300)
    assert [fetch(place, door.key, rank) for rank in range(2)] == [b"work"] * 2
    assert threading.active_count() <= threads
    assert descriptors() - files - len(strangers) <= Server.max_pending + 2 + 2  # it expects 2
    strangers[0].settimeout(PATIENCE)
    assert strangers[0].recv(1) == b"", "the oldest had to go"
    assert fetch(place, door.key, 0) == b"work"


def test_who_is_slow_is_served_before_who_is_silent(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is far away has said its hello, or has proved itself, when a flood comes: it does
    not have to go for a silent caller."""
    at_own_addresses(monkeypatch)
    door = stack.enter_context(ResultServer(2, b"work", False))
    key = bytes.fromhex(door.key)
    proved = stack.enter_context(open_connection(f"127.0.0.1:{port_of(door.address)}", key))
    (slow,) = silent(stack, door.address, 1)
    session = Session(key, 1)
    slow.settimeout(PATIENCE)
    slow.sendall(session.outgoing)
    session.outgoing.clear()
    session.receive(slow.recv(1000))
    strangers = silent(stack, door.address, 200)
    strangers[0].settimeout(PATIENCE)
    assert strangers[0].recv(1) == b"", "they have reached it: the oldest silent one had to go"
    slow.sendall(session.outgoing)
    session.outgoing.clear()
    heard: list[bytes] = []
    while not heard:
        heard = session.receive(slow.recv(1000))
    assert heard == [b"work"]
    assert proved.receive(PATIENCE) == b"work"


def test_a_stranger_has_its_least_time_though_an_older_one_stays(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest has said its hello, and keeps its place. It made a flood drive out the silent at
    once, among them honest callers whose hello is on its way."""
    now = [100.0]
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ResultServer, "patience", 1e5)
    monkeypatch.setattr(ResultServer, "max_pending", 2)
    door = stack.enter_context(ResultServer(1, b"", False))
    (greeted,) = silent(stack, door.address, 1)
    greeted.sendall(Session(bytes(32), 0).outgoing)
    assert greeted.recv(100)
    now[0] += 10.0
    young = silent(stack, door.address, 3)  # the last one finds no place

    for _ in range(6):  # turns of the door's thread
        turned = threading.Event()
        door.call_soon(turned.set)
        assert turned.wait(PATIENCE)
    with pytest.raises(BlockingIOError):
        young[0].recv(1, socket.MSG_DONTWAIT)
    now[0] += 1.0
    young[0].settimeout(PATIENCE)
    assert young[0].recv(1) == b"", "it goes for the last one, later"
    with pytest.raises(BlockingIOError):
        greeted.recv(1, socket.MSG_DONTWAIT)


def test_a_silent_stranger_has_to_go(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResultServer, "patience", 0.1)
    door = stack.enter_context(ResultServer(1, b"", False))
    (stranger,) = silent(stack, door.address, 1)
    stranger.settimeout(PATIENCE)
    assert stranger.recv(1) == b""


FEW = """
import resource, sys
from farandole.launch.result_server import ResultServer
with ResultServer(1, b"work", False) as door:
    resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
    print(door.address, door.key, flush=True)
    sys.stdin.read()
    print(sorted(door.here), flush=True)
"""


def test_a_door_without_descriptors_goes_on(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_own_addresses(monkeypatch)
    process = subprocess.Popen(
        [sys.executable, "-c", FEW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    address, key = process.stdout.readline().split()
    silent(stack, address, 100)
    assert fetch(f"127.0.0.1:{port_of(address)}", key, 0) == b"work"
    out, _ = process.communicate(timeout=PATIENCE)
    assert out == "[0]\n"


SUPERVISOR = """
import resource, subprocess, sys
from queue import SimpleQueue
from types import SimpleNamespace
from farandole.launch.supervisor import _AgentListener

class Hears:
    events = SimpleQueue()
    def welcome(self, client): print("came", flush=True)
    def lose(self, client): print("gone", flush=True)

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with _AgentListener(False, Hears()) as door:
    print(door.address, door.key, flush=True)
    for line in sys.stdin:
        Hears.events.get()()
    print("starts", subprocess.run(["true"]).returncode, flush=True)  # a rank, say
"""


def test_1500_silent_callers_of_a_supervisor(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers its agents, and has descriptors left to start what it wants."""
    at_own_addresses(monkeypatch)
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdin is not None
    address, key = process.stdout.readline().split()
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(few, 4096)), most))
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (few, most))
    strangers = silent(stack, address, 1500)
    with open_connection(f"127.0.0.1:{port_of(address)}", bytes.fromhex(key)):
        process.stdin.write("a word\n")
        process.stdin.flush()
        assert process.stdout.readline() == "came\n"
        held = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        assert held < 256 - 64, "the callers have left it most of its descriptors"
        strangers[0].settimeout(PATIENCE)
        assert strangers[0].recv(1) == b"", "they have reached it: the oldest had to go"
        process.stdin.close()
        assert process.stdout.readline() == "starts 0\n"


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 200, os.urandom(4096)]


@pytest.mark.parametrize("data", GARBAGE, ids=["http", "zeros", "ones", "random"])
@pytest.mark.parametrize("here", [True, False])
def test_garbage(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, here: bool, data: bytes
) -> None:
    """A stranger who says it is sent away at once, and told nothing; by the Unix socket too, where
    the stranger is of this user and does not know the key."""
    monkeypatch.setattr(ResultServer, "patience", 1e5)  # for who is silent
    door = stack.enter_context(ResultServer(1, b"work", here))
    if here:
        stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
        stranger.connect(door.address)
    else:
        (stranger,) = silent(stack, door.address, 1)
    stranger.settimeout(PATIENCE)
    said = b""
    with suppress(OSError):  # what is left unread makes the end a reset
        stranger.sendall(data)
        said = stranger.recv(100)
    assert said == b""
    assert fetch(door.address, door.key, 0) == b"work"


@pytest.mark.parametrize("here", [True, False])
def test_a_wrong_key(here: bool) -> None:
    with ResultServer(1, b"secret work", here) as door:
        with pytest.raises(ConnectionError, match=r"hung up|reset"):
            open_connection(door.address, bytes(32))
        assert not door.here
        assert fetch(door.address, door.key, 0) == b"secret work"


@pytest.mark.parametrize(
    "word",
    [
        *(b"", b"{", b"\xff", b"status", b"[]", b"7", b'["over"]', b'["status", "x"]'),
        *(b'["status", 1]', b'["blob", "a", 1]', b'["blob", "a", "b", 1, "c"]'),
    ],
)
def test_what_no_agent_says(word: bytes) -> None:
    """Of one who knows the key."""
    hears = Hears()
    with (
        _AgentListener(True, hears) as door,  # type: ignore[arg-type]
        open_connection(door.address, bytes.fromhex(door.key)) as client,
    ):
        assert hears.next() == "came"
        client.send(word)
        assert hears.next() == "gone"
