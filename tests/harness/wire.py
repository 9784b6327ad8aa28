# SPDX-License-Identifier: Apache-2.0
"""A wire between network namespaces that loses, delays, repeats, reorders and cuts what it carries.

`Wire` is the test's side. It starts this file as a program, which forwards Ethernet frames between
ports (AF_PACKET) as a switch does. No other module is needed there, so that it starts soon.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Weather", "Wire", "inside", "pids_in"]

_CLONE_NEWNET = 0x40000000
_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_ETH_P_ALL, _CARRIED = 0x0003, (b"\x08\x00", b"\x08\x06")  # IPv4 and ARP
_SIOCETHTOOL = 0x8946
# Checksums in software, and no frame longer than the link's MTU: what is forwarded must be whole.
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO
_LONGEST = 1 << 16
_BATCH = 64  # frames of one port before the next one's turn
_REORDERED = (0.001, 0.010)  # seconds that a frame is held, so that others overtake it
_BUFFER = 8 << 20


@dataclass(frozen=True)
class Weather:
    """What the wire does to each frame. Probabilities are between 0 and 1, times in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0  # at most so much more than `delay`
    cut: tuple[tuple[int, int], ...] = ()  # (from, to): ports between which nothing passes

    def __str__(self) -> str:
        told = [f"{name} {x:g}" for name, x in asdict(self).items() if name != "cut" and x]
        return ", ".join(told + [f"{a} -/-> {b}" for a, b in self.cut]) or "fair"


class Wire:
    """A running wire whose ports are interfaces of one namespace; the weather is fair at first.

    When it is closed, or whoever has made it dies, the forwarder kills what lives in the
    `namespaces` and removes them.
    """

    def __init__(
        self,
        namespace: str,
        ports: Sequence[str],
        far: Sequence[tuple[str, str]],
        namespaces: Sequence[str],
        seed: int = 0,
    ) -> None:
        """`far`: the ports' other ends, each a namespace (empty: this process's) and a device."""
        setup = {
            "namespace": namespace,
            "ports": list(ports),
            "far": list(far),
            "namespaces": list(namespaces),
            "seed": seed,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def set(self, weather: Weather) -> dict[str, int]:
        """Changes the weather, and returns the numbers of frames so far; the change holds then.

        The keys are `carried`, `lost`, `duplicated`, `reordered`, `cut` and `failed`: the last
        counts frames that a port refused.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(weather)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the wire has ended with {self._process.wait()}")
        answer: dict[str, int] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the forwarder, with the namespaces."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# ---- the program


class _Forwarder:
    """Moves frames from port to port, each when it is due."""

    def __init__(self, sockets: Sequence[socket.socket], seed: int) -> None:
        self._ports = sockets
        self._random = random.Random(seed)
        self._weather = Weather()
        self._homes: dict[bytes, int] = {}  # where each address was seen
        # When due, in the order of their coming, to which port.
        self._held: list[tuple[float, int, int, bytes]] = []
        self._serial = 0
        self._last: dict[
            tuple[int, int], float
        ] = {}  # when the last frame from port to port is due
        self.counts = dict.fromkeys(
            ("carried", "lost", "duplicated", "reordered", "cut", "failed"), 0
        )

    def set(self, weather: Weather) -> None:
        """From the next frame on."""
        self._weather = weather

    def read(self, port: int) -> None:
        """Takes what has come to a port."""
        for _ in range(_BATCH):
            try:
                frame = self._ports[port].recv(_LONGEST)
            except OSError:  # nothing more, or the link is down
                return
            if frame[12:14] not in _CARRIED:
                continue
            self._homes[frame[6:12]] = port
            home = self._homes.get(frame[:6], -1)
            for to in [home] if home >= 0 else range(len(self._ports)):
                if to != port:
                    self._pass(frame, port, to)

    def _pass(self, frame: bytes, port: int, to: int) -> None:
        weather = self._weather
        if (port, to) in weather.cut:
            self.counts["cut"] += 1
            return
        if self._happens(weather.loss):
            self.counts["lost"] += 1
            return
        copies = 1
        if self._happens(weather.duplicate):
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            due = self._due(port, to)
            if due <= 0.0:
                self._send(frame, to)
            else:
                self._serial += 1
                heapq.heappush(self._held, (due, self._serial, to, frame))

    def _due(self, port: int, to: int) -> float:
        """When a frame leaves; 0: at once. Only a reordered one is overtaken."""
        weather = self._weather
        reordered = self._happens(weather.reorder)
        if not (reordered or weather.delay or weather.jitter or self._held):
            return 0.0
        now = time.monotonic()
        due = now + weather.delay + weather.jitter * self._random.random()
        due = max(due, self._last.get((port, to), 0.0))
        if reordered:
            self.counts["reordered"] += 1
            return due + self._random.uniform(*_REORDERED)
        self._last[port, to] = due
        return due

    def _happens(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def _send(self, frame: bytes, to: int) -> None:
        try:
            self._ports[to].send(frame)
            self.counts["carried"] += 1
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise  # an offload is on: the wire does not do what it should
            self.counts["failed"] += 1

    def send_due(self) -> float | None:
        """Sends what is due; returns the seconds until more is, None if nothing is held."""
        while self._held:
            wait = self._held[0][0] - time.monotonic()
            if wait > 0.0:
                return wait
            _, _, to, frame = heapq.heappop(self._held)
            self._send(frame, to)
        return None


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """A context in this network namespace; empty: where the process is."""
    if not namespace:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        failed = libc.setns(fd, _CLONE_NEWNET)
        os.close(fd)
        if failed:
            raise OSError(ctypes.get_errno(), f"setns {path}")

    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter(f"/run/netns/{namespace}")
    try:
        yield
    finally:
        enter(f"/proc/self/fd/{before}")
        os.close(before)


def _switch_offloads_off(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("@II", command, 0), 8)
            request = struct.pack("@16sP", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # a device without it
                fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def _open(port: str) -> socket.socket:
    """All that comes to this interface of the present namespace, and a way to send there."""
    _switch_offloads_off(port)
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, 33, _BUFFER)  # SO_RCVBUFFORCE
    opened.bind((port, _ETH_P_ALL))
    opened.setblocking(False)
    return opened


def _forward(forwarder: _Forwarder, ports: Sequence[socket.socket]) -> None:
    """Until the standard input ends; each of its lines is a new weather."""
    selector = selectors.DefaultSelector()
    for number, port in enumerate(ports):
        selector.register(port, selectors.EVENT_READ, number)
    selector.register(sys.stdin, selectors.EVENT_READ, -1)
    told = b""
    while True:
        print(json.dumps(forwarder.counts), flush=True)
        while b"\n" not in told:
            for key, _ in selector.select(forwarder.send_due()):
                if key.data >= 0:
                    forwarder.read(key.data)
                    continue
                more = os.read(0, 1 << 16)
                if not more:
                    return
                told += more
        line, _, told = told.partition(b"\n")
        words = json.loads(line)
        words["cut"] = tuple(tuple(pair) for pair in words["cut"])
        forwarder.set(Weather(**words))


def pids_in(namespace: str) -> list[int]:
    """Processes in a network namespace; none if it is gone."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def _remove(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        for pid in pids_in(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _main() -> None:
    setup = json.loads(sys.argv[1])
    try:
        for namespace, device in setup["far"]:
            with inside(namespace):
                _switch_offloads_off(device)
        with inside(setup["namespace"]):
            ports = [_open(port) for port in setup["ports"]]
        _forward(_Forwarder(ports, setup["seed"]), ports)
    finally:
        _remove(setup["namespaces"])


if __name__ == "__main__":
    _main()
