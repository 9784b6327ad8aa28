# SPDX-License-Identifier: Apache-2.0
"""A network that flips one bit of a message between two hosts, as faulty hardware does."""

from __future__ import annotations

import re

import pytest

from harness.hosts_job import Start

# Ranks of the first host call rank 2, on the other one, at another port, where a relay of its
# process flips one bit of what they send on data lines. Control messages pass it by, since rank 2
# calls rank 0.
PROGRAM = """
import socket, struct, threading
import numpy as np
from mpi4py import MPI
import farandole as fd
from farandole import runtime

rank = MPI.COMM_WORLD.Get_rank()
listener = socket.create_server(("", 0))
there = MPI.COMM_WORLD.bcast(listener.getsockname()[1], 2)
own_port, seen = [], [0]
LATE = 300_000  # bytes that arrive as they were sent

def pump(source, target, altering):
    while data := source.recv(1 << 16):
        if altering and seen[0] <= LATE < seen[0] + len(data):
            at = LATE - seen[0]
            data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1:]
        seen[0] += altering * len(data)
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

def relay():
    while True:
        caller, _ = listener.accept()
        rank_2 = socket.create_connection(("127.0.0.1", own_port[0]))
        for source, target, altering in ((caller, rank_2, True), (rank_2, caller, False)):
            threading.Thread(target=pump, args=(source, target, altering), daemon=True).start()

with_world = runtime._with_world

def with_world_altered(job, node, blobs, call):
    # The last field but one of a rank's peer info: no transport has addresses of its own.
    own_port[:] = struct.unpack("<H", blobs[2][-6:-4])
    if rank < 2:
        blobs = list(blobs)
        blobs[2] = blobs[2][:-6] + struct.pack("<H", there) + blobs[2][-4:]
    return with_world(job, node, blobs, call)

runtime._with_world = with_world_altered
if rank == 2:
    threading.Thread(target=relay, daemon=True).start()
fd.init()
try:
    for step in range(100):
        x = np.full(50_000, rank + step, np.float32)
        fd.allreduce_(x, op=fd.Sum, name="layer.weight")
        assert (x == sum(range(4)) + 4 * step).all(), x
    tell("nothing was found")
except AssertionError:
    tell("a wrong sum")
except fd.PeerError as error:
    tell("PeerError", error)
    tell("faults", fd.metrics()["faults_found"])
"""


@pytest.mark.parametrize("checksum", ["on", "off"])
def test_a_flipped_bit_is_an_error_on_all_ranks(start: Start, checksum: str) -> None:
    env = {"FARANDOLE_WIRE": "tcp", "FARANDOLE_WIRE_CHECKSUM": checksum}
    job = start(PROGRAM, [2, 2], env=env)
    if checksum == "off":  # the relay does flip it
        job.wait_until_said(2, "a wrong sum")
        return
    names = job.hosts.names
    for rank in range(4):
        job.wait_until_said(rank, "faults")
        told = job.said(rank)
        assert re.search(
            rf"PeerError .*allreduce 'layer.weight': \d+ bytes from rank [01] on {names[0]} "
            rf"arrived changed on rank 2 on {names[1]}: memory, a network card or a switch",
            told,
        ), told
    assert "faults 1" in job.said(2)
    assert "faults 0" in job.said(0)
