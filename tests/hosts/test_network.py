# SPDX-License-Identifier: Apache-2.0
"""Jobs on hosts that are network namespaces: what crosses the links, and links that are slow."""

from __future__ import annotations

import re
import time

import pytest

from harness.hosts_job import HostsJob, Start
from harness.process import PATIENCE

# Every rank checks every result, rank 0 tells.
STEPS = """
import numpy as np
import farandole as fd
fd.init()
size, rank = fd.size(), fd.rank()
steps, elements, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
print(f"rank {rank} on {os.uname().nodename} {fd.local_rank()}/{fd.local_size()} pid {os.getpid()}")
if len(sys.argv) > 4 and os.uname().nodename.endswith(sys.argv[4]):
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 10)
    pause += 0.2
fd.barrier()
for step in range(steps):
    x = np.full(elements, (rank + 1.0) * (step + 1), np.float32)
    y = fd.allreduce(x, op=fd.Sum)
    assert (y == (step + 1) * size * (size + 1) / 2).all(), (step, y)
    if rank == 0:
        print("step", step, flush=True)
    time.sleep(pause)
fd.shutdown()
print("done", rank)
"""


def finish(job: HostsJob, seconds: float = PATIENCE) -> str:
    """The output of a job in which all ranks came to the end."""
    out = job.finish(seconds)
    assert out.count("done") == sum(job.hosts.ranks)
    return out


@pytest.mark.parametrize("ranks", [[2, 2], [2, 1, 1]], ids=["2x2", "2-1-1"])
def test_ranks_share_memory_on_their_own_host_only(start: Start, ranks: list[int]) -> None:
    job = start(STEPS, ranks, 5, 50_000, 0)
    out = finish(job)
    places = re.findall(r"rank \d+ on (\S+) (\d)/(\d)", out)
    expected = [
        (name, str(local), str(n))
        for name, n in zip(job.hosts.names, ranks, strict=True)
        for local in range(n)
    ]
    assert sorted(places) == expected


WIRES = pytest.mark.parametrize("wire", ["mpi", "tcp"])


@WIRES
def test_each_link_carries_each_byte_once(start: Start, wire: str) -> None:
    """Two hosts: what each must send is as long as the tensor, however many ranks they have."""
    steps, elements = 10, 1 << 20
    job = start(STEPS, [2, 2], steps, elements, 0, env={"FARANDOLE_WIRE": wire})
    finish(job)
    for host in range(2):
        sent, _ = job.hosts.traffic(host)
        assert 1 <= sent / (steps * 4 * elements) < 1.05  # headers, acknowledgements, start and end


NO_INTERFACE = """
import farandole as fd
try:
    fd.init()
except Exception as error:
    tell(type(error).__name__, error)
"""


def test_only_the_interfaces_that_the_user_names(start: Start) -> None:
    finish(start(STEPS, [1, 1], 3, 1000, 0, env={"FARANDOLE_INTERFACE": "=eth0,10.0.0.0/8"}))


def test_a_host_without_such_an_interface_says_what_it_has(start: Start) -> None:
    hosts = start.hosts([1, 1])
    job = start(NO_INTERFACE, hosts, env={"FARANDOLE_INTERFACE": "ib"})
    job.finish()
    for rank in range(2):
        assert "FARANDOLE_INTERFACE=ib selects no network interface" in job.said(rank)
        assert f"it has eth0 {hosts.address(rank)}" in job.said(rank)


@WIRES
def test_a_link_that_is_down_for_3_seconds(start: Start, wire: str) -> None:
    job = start(STEPS, [2, 2], 60, 100_000, 0.05, env={"FARANDOLE_WIRE": wire})
    process = job.job.process
    process.wait_for_output("step 5")
    job.hosts.set_link(1, up=False)
    time.sleep(3)  # the event itself
    job.hosts.set_link(1, up=True)
    seen = len(re.findall("^step", process.output, re.MULTILINE))
    assert seen < 60
    process.wait_for_output(f"step {min(seen + 2, 59)}", timeout=10)
    finish(job)


@WIRES
def test_a_slow_link(start: Start, wire: str) -> None:
    env = {"FARANDOLE_WIRE": wire}
    finish(start(STEPS, [2, 1, 1], 3, 250_000, 0, rate="40mbit", env=env))


def test_a_host_that_is_much_slower(start: Start) -> None:
    """Its ranks come last to every step, and get a tenth of the time that others want."""
    job = start(STEPS, [2, 2], 10, 100_000, 0, "h1", env={"FARANDOLE_PEER_TIMEOUT": "5"})
    finish(job)


# Only MPI's ports get from host to host, as on clusters whose fabric only MPI knows.
MPI_PORTS = (10000, 64)
PORTS_OPTION = "--mca btl_tcp_port_min_v4 {} --mca btl_tcp_port_range_v4 {}".format(*MPI_PORTS)


NO_TCP = """
import farandole as fd
try:
    fd.init()
except fd.FarandoleError as error:
    tell(type(error).__name__, error)
"""


def test_where_tcp_between_hosts_is_blocked_no_rank_starts(start: Start) -> None:
    hosts = start.hosts([2, 1, 1])
    hosts.allow_only(MPI_PORTS)
    env = {"FARANDOLE_INIT_TIMEOUT": "5"}
    job = start(NO_TCP, hosts, env=env, mpi_args=tuple(PORTS_OPTION.split()))
    for rank in range(4):
        job.wait_until_said(rank, "\n")
    assert re.match(r"PeerError .*rank[s]? 2.*TCP", job.said(0)), job.everything()
    job.finish()


# What was asked for cannot be had: every rank learns so from the first large call. Rank 1 says by
# which port its connection to the other host's leader leaves.
BLOCKED = """
import numpy as np
import farandole as fd
fd.init()
if fd.rank() == 1:
    for line in open("/proc/self/net/tcp").readlines()[1:]:
        local, remote, state = line.split()[1:4]
        if state == "01" and remote.startswith(sys.argv[1]):
            tell("port", int(local.split(":")[1], 16))
tell("up")
wait_for_word()
assert fd.allreduce(np.ones(3, np.float32), op=fd.Sum)[0] == fd.size()
try:
    fd.allreduce(np.ones(300_000, np.float32))
except fd.PeerError as error:
    tell("PeerError", error)
fd.shutdown()
"""


def test_a_wire_by_tcp_where_that_is_blocked_is_an_error_on_all_ranks(start: Start) -> None:
    hosts = start.hosts([1, 1])
    env = {"FARANDOLE_WIRE": "tcp", "FARANDOLE_PEER_TIMEOUT": "3"}
    far = "".join(f"{int(part):02X}" for part in reversed(hosts.address(0).split(".")))
    job = start(BLOCKED, hosts, far, env=env, mpi_args=tuple(PORTS_OPTION.split()))
    for rank in range(2):
        job.wait_until_said(rank, "up")
    ports = [int(port) for port in re.findall(r"port (\d+)", job.said(1))]
    hosts.allow_only(MPI_PORTS, *((port, 1) for port in ports))
    for rank in range(2):
        job.give_word(rank)
    for rank in range(2):
        job.wait_until_said(rank, "PeerError")
        assert re.search(r"rank [01] on \S+ can't be reached by TCP", job.said(rank))
    job.finish()
