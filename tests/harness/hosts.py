# SPDX-License-Identifier: Apache-2.0
"""Hosts simulated on this machine: network namespaces joined by a bridge, or by a wire that does
harm (harness.wire), each with its own name, processes, System V memory, /dev/shm and folder of Unix
sockets, so that memory shared by mistake fails. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.process import SLOWNESS
from harness.wire import Weather, Wire, pids_in

__all__ = ["SimulatedHosts", "simulated_hosts", "why_not"]

# What mpirun and farandole call instead of ssh: options, the host's name, the command in pieces.
_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
  case "$1" in -[oip]) shift ;; esac
  shift
done
host="$1"; shift
# Daemons name their folders by process numbers, which are alike on all hosts.
export TMPDIR="@rooms@/$host"
sockets="/tmp/farandole-$(id -u)"
mkdir -p "$TMPDIR" && mkdir -p -m 700 "$TMPDIR/sockets" "$sockets"
exec ip netns exec "$host" unshare -u -i -m -p --fork --kill-child sh -c '
  mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc && mount --bind "$2" /etc/hosts &&
    mount --bind "$TMPDIR/sockets" "$4" && hostname "$1" || exit 1
  # A killed daemon leaves its folder: the next one on this host has another number.
  echo "$3" > /proc/sys/kernel/ns_last_pid
  shift 4; exec sh -c "$*"' sh "$host" "$(dirname "$0")/hosts" $$ "$sockets" "$@"
"""
_GONE_SECONDS = 5.0 * SLOWNESS


def why_not() -> str:
    """Why hosts cannot be simulated here; empty: they can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    name = f"fh{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


class SimulatedHosts:
    """The hosts, `ranks[i]` places on host i; made by simulated_hosts()."""

    def __init__(self, folder: Path, ranks: Sequence[int], seed: int | None = None) -> None:
        """`seed`: of the wire's harm; None: there is a bridge instead."""
        self.ranks = list(ranks)
        self.tag = f"{os.getpid() % 100000}"
        self.names = [f"fh{self.tag}h{i}" for i in range(len(ranks))]
        self._seed = seed
        self._wire: Wire | None = None
        self._bridge = f"fb{self.tag}"  # or this machine's own end of the wire
        self._middle = f"fh{self.tag}w"  # where the wire's ports are
        self._net = f"10.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
        self._ssh = folder / "bin" / "ssh"
        # Not below `folder`: the name of a socket that Python makes there has at most 107 bytes.
        self._rooms = tempfile.mkdtemp(prefix="fh")
        self._ssh.parent.mkdir(exist_ok=True)
        self._ssh.write_text(_SSH.replace("@rooms@", self._rooms))
        self._ssh.chmod(0o755)
        addresses = [f"{self.address(i)} {name}\n" for i, name in enumerate(self.names)]
        # Of this machine too: Hydra's daemons call back by its name.
        addresses = [
            "127.0.0.1 localhost\n",
            f"{self._net}.254 {os.uname().nodename}\n",
            *addresses,
        ]
        (self._ssh.parent / "hosts").write_text("".join(addresses))

    def mpi_args(self) -> list[str]:
        """Options of Open MPI 5's mpirun that place the ranks there."""
        return ["--prtemca", "plm_ssh_agent", str(self._ssh), "--host", self.places()]

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on a host, without mpirun."""
        return [str(self._ssh), self.names[host], *argv]

    def environment(self) -> dict[str, str]:
        """The ssh that reaches the hosts; for mpirun, as many ranks as they have places."""
        path = f"{self._ssh.parent}:{os.environ['PATH']}"
        return {"PRTE_MCA_rmaps_default_mapping_policy": "slot", "PATH": path}

    def places(self) -> str:
        """All hosts and places, for -H."""
        return ",".join(f"{name}:{n}" for name, n in zip(self.names, self.ranks, strict=True))

    def up(self) -> None:
        """Makes the bridge or the wire, the namespaces and the links."""
        master = ""
        if self._seed is not None:
            own = self.port(len(self.names))
            _run(f"ip netns add {self._middle}")
            _run(f"ip link add {self._bridge} type veth peer name {own} netns {self._middle}")
            _run(f"{self._ip} link set {own} up")
        else:
            master = f"master {self._bridge}"
            _run(f"ip link add {self._bridge} type bridge")
        _run(f"ip addr add {self._net}.254/24 dev {self._bridge}")
        _run(f"ip link set {self._bridge} up")
        for i, name in enumerate(self.names):
            _run(f"ip netns add {name}")
            _run(f"{self._ip} link add {self.port(i)} type veth peer name eth0 netns {name}")
            _run(f"{self._ip} link set {self.port(i)} {master} up")
            _run(f"ip -n {name} addr add {self.address(i)}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
        if self._seed is not None:
            ports = [self.port(i) for i in range(len(self.names) + 1)]
            far = [*((name, "eth0") for name in self.names), ("", self._bridge)]
            every = [*self.names, self._middle]
            self._wire = Wire(self._middle, ports, far, every, self._seed)

    @property
    def _ip(self) -> str:
        """`ip` where the ports are."""
        return "ip" if self._seed is None else f"ip -n {self._middle}"

    def weather(self, weather: Weather) -> dict[str, int]:
        """Changes what the wire does, as Wire.set(): host i is port i, this machine the last."""
        if self._wire is None:
            raise ValueError("these hosts have a bridge: give a seed, for a wire")
        return self._wire.set(weather)

    def address(self, host: int) -> str:
        """A host's address."""
        return f"{self._net}.{host + 1}"

    def port(self, host: int) -> str:
        """The near end of a host's link: the bridge's port, or the wire's."""
        return f"fv{self.tag}p{host}"

    def shape(self, rate: str, hosts: Sequence[int] | None = None) -> None:
        """Limits the links of `hosts` (None: all) to `rate` (as tc has it: 1gbit), both ways."""
        shaped = f"root tbf rate {rate} burst 256kb latency 50ms"
        for host in range(len(self.names)) if hosts is None else hosts:
            _run(f"{self._ip.replace('ip', 'tc', 1)} qdisc replace dev {self.port(host)} {shaped}")
            _run(f"ip netns exec {self.names[host]} tc qdisc replace dev eth0 {shaped}")

    def allow_only(self, *ports: tuple[int, int]) -> None:
        """Blocks TCP from host to host except from or to `ports` (first, count)."""
        for i, name in enumerate(self.names):
            inside = f"ip -n {name} rule add"
            for first, count in ports:
                for end in ("sport", "dport"):
                    range_ = f"{first}-{first + count - 1}"
                    _run(f"{inside} priority 10 ipproto tcp {end} {range_} lookup main")
            for other in set(range(len(self.names))) - {i}:
                _run(f"{inside} priority 12 to {self.address(other)} ipproto tcp prohibit")

    def set_link(self, host: int, up: bool) -> None:
        """Pulls a host's cable, or plugs it in."""
        _run(f"{self._ip} link set {self.port(host)} {'up' if up else 'down'}")

    def kill(self, host: int) -> None:
        """Kills everything on a host, MPI's daemon included; it is there for new processes."""
        self._kill(self.names[host])

    def cut_power(self, host: int) -> None:
        """Ends a host without a word to others: their connections do not see it end."""
        self.set_link(host, up=False)
        self.kill(host)

    def traffic(self, host: int) -> tuple[int, int]:
        """(bytes, packets) that the host has sent so far."""
        folder = Path(f"/sys/class/net/{self.port(host)}/statistics")
        return int((folder / "rx_bytes").read_text()), int((folder / "rx_packets").read_text())

    def down(self) -> None:
        """Kills what runs there and removes everything, whatever state it is in."""
        for i, name in enumerate(self.names):
            self._kill(name)
            subprocess.run(["ip", "link", "del", self.port(i)], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if self._wire is not None:
            self._wire.close()
        subprocess.run(["ip", "netns", "del", self._middle], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        shutil.rmtree(self._rooms, ignore_errors=True)

    @staticmethod
    def pids(name: str) -> list[int]:
        """Processes in a host's network namespace."""
        return pids_in(name)

    def _kill(self, name: str) -> None:
        """What runs there now; not what a job starts there when it notices.

        An agent, outside of its command's process namespace, ends when all inside have: mpirun must
        not see it end before the ranks' connections do.
        """
        deadline, doomed = time.monotonic() + _GONE_SECONDS, set(self.pids(name))
        for each in ({pid for pid in doomed if _is_inside(pid)}, doomed):
            for pid in each & set(self.pids(name)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while each & set(self.pids(name)) and time.monotonic() < deadline:
                time.sleep(0.02)  # they are not our children: no event says that they end


def _is_inside(pid: int) -> bool:
    """Whether a process has another process namespace than this one."""
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    except OSError:  # it has ended
        return False


@contextlib.contextmanager
def simulated_hosts(
    folder: Path, ranks: Sequence[int], seed: int | None = None
) -> Iterator[SimulatedHosts]:
    """Hosts that are gone when the block is left, however it is left; `seed`: see there."""
    hosts = SimulatedHosts(folder, ranks, seed)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
