# SPDX-License-Identifier: Apache-2.0
"""Somebody between two hosts who alters the bytes of objects on their way."""

from __future__ import annotations

from harness.hosts_job import Start
from harness.relay import RELAY

PROGRAM = (
    RELAY
    + """
import numpy as np
import farandole as fd

rank = MPI.COMM_WORLD.Get_rank()
relay(1, lambda data: data.replace(b"harmless", b"harmful!"))
fd.init()

def attempt(what, call):
    try:
        tell(what, "got", sorted(set(call())))
    except fd.PeerError as error:
        tell(what, "PeerError", error)

many = ["harmless" * 1000 + str(i) for i in range(100 * (1 - rank))]
attempt("broadcast", lambda: [x[:8] for x in fd.broadcast_object(many, 0, name="b")])
attempt("gather", lambda: [x[:8] for x in fd.allgather_object(many, name="g")[0]])
attempt("small", lambda: [fd.broadcast_object("harmless", 0)])
attempt("small gather", lambda: [fd.allgather_object("harmless" if rank == 0 else "x")[0]])
x = np.frombuffer(bytearray(b"harmless" * 100_000 if rank == 0 else 800_000), np.uint8)
fd.broadcast_(x, 0)
tell("plain", bytes(x[:8]))
fd.shutdown()
"""
)


def test_an_object_that_is_altered_is_not_unpickled(start: Start) -> None:
    job = start(PROGRAM, [1, 1], env={"FARANDOLE_WIRE": "tcp"})
    job.finish()
    assert "plain b'harmful!'" in job.said(1), job.said(1)  # the attacker is at work
    assert "broadcast got ['harmless']" in job.said(0)
    for call in ("broadcast", "gather"):
        assert f"{call} PeerError" in job.said(1), job.said(1)
    assert "the object of rank 0 was altered" in job.said(1)
    for call in ("small", "small gather"):  # with the control messages
        assert f"{call} got ['harmless']" in job.said(1), job.said(1)
