# SPDX-License-Identifier: Apache-2.0
"""A network that flips one bit of a message between two hosts, as faulty hardware does."""

from __future__ import annotations

import re

import pytest

from harness.hosts_job import Start
from harness.relay import RELAY

PROGRAM = (
    RELAY
    + """
import numpy as np
import farandole as fd

rank, seen = MPI.COMM_WORLD.Get_rank(), 0
LATE = 300_000  # bytes that arrive as they were sent

def flipped(data):
    global seen
    at, seen = LATE - seen, seen + len(data)
    if 0 <= at < len(data):
        data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1:]
    return data

relay(2, flipped)
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
)


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
