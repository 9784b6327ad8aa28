# SPDX-License-Identifier: Apache-2.0
"""The wire that does harm (harness.wire): what it does to frames."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.hosts import SimulatedHosts, simulated_hosts
from harness.process import PATIENCE
from harness.wire import Weather, inside

PORT = 5000


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SimulatedHosts]:
    with simulated_hosts(tmp_path, [1, 1], seed=3) as made:
        yield made


def receive_all(listener: socket.socket, got: bytearray) -> None:
    with listener.accept()[0] as connection:
        while part := connection.recv(1 << 16):
            got += part


@pytest.mark.parametrize(
    "weather",
    [
        Weather(),
        Weather(loss=0.03),
        Weather(duplicate=0.1),
        Weather(reorder=0.1),
        Weather(delay=0.002, jitter=0.002),
        Weather(loss=0.02, duplicate=0.05, reorder=0.05, delay=0.001, jitter=0.001),
    ],
    ids=str,
)
def test_tcp_brings_all_bytes_in_whatever_weather(hosts: SimulatedHosts, weather: Weather) -> None:
    sent, got = random.Random(1).randbytes(1_000_000), bytearray()
    with inside(hosts.names[1]):
        listener = socket.create_server((hosts.address(1), PORT))
    reader = threading.Thread(target=receive_all, args=(listener, got))
    reader.start()
    hosts.weather(weather)
    with inside(hosts.names[0]):
        connection = socket.create_connection((hosts.address(1), PORT), PATIENCE)
    with listener, connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        reader.join(PATIENCE)
    assert bytes(got) == sent
    counts = hosts.weather(Weather())
    assert counts["carried"] > len(sent) // 1500
    for name, probability in {
        "lost": weather.loss,
        "duplicated": weather.duplicate,
        "reordered": weather.reorder,
    }.items():
        assert bool(counts[name]) == bool(probability), counts
    assert counts["cut"] == 0


def datagrams(hosts: SimulatedHosts, host: int) -> socket.socket:
    with inside(hosts.names[host]):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((hosts.address(host), PORT))
    made.settimeout(PATIENCE)
    return made


def test_a_cut_in_one_direction_leaves_the_other(hosts: SimulatedHosts) -> None:
    with datagrams(hosts, 0) as a, datagrams(hosts, 1) as b:
        for word in (b"there", b"both know each other's address"):
            a.sendto(word, b.getsockname())
            assert b.recv(100) == word
        b.sendto(b"back", a.getsockname())
        assert a.recv(100) == b"back"
        cut = Weather(cut=((0, 1),))
        hosts.weather(cut)
        a.sendto(b"lost", b.getsockname())
        b.sendto(b"behind it", a.getsockname())
        assert a.recv(100) == b"behind it"
        while not hosts.weather(cut)["cut"]:
            pass
        hosts.weather(Weather())
        a.sendto(b"again", b.getsockname())
        assert b.recv(100) == b"again"
