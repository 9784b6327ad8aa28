# SPDX-License-Identifier: Apache-2.0
"""Somebody between two hosts who alters the bytes of objects on their way."""

from __future__ import annotations

from harness.hosts_job import Start

# Rank 0 calls rank 1 at another port, where a relay of rank 1's process replaces one text by
# another in all that rank 0 sends on data lines. Control messages come from rank 1 and pass it by.
PROGRAM = """
import socket, struct, threading
import numpy as np
from mpi4py import MPI
import farandole as fd
from farandole import runtime

HONEST, OTHER = b"harmless", b"harmful!"
rank = MPI.COMM_WORLD.Get_rank()
listener = socket.create_server(("", 0))
there = MPI.COMM_WORLD.bcast(listener.getsockname()[1], 1)
own_port = []

def pump(source, target, altering):
    kept = b""
    while data := source.recv(1 << 16):
        if altering:
            data = data.replace(HONEST, OTHER)
        target.sendall(data)

def relay():
    while True:
        caller, _ = listener.accept()
        rank_1 = socket.create_connection(("127.0.0.1", own_port[0]))
        for source, target, altering in ((caller, rank_1, True), (rank_1, caller, False)):
            threading.Thread(target=pump, args=(source, target, altering), daemon=True).start()

with_world = runtime._with_world

def with_world_altered(job, node, blobs, call):
    # The last field but one of a rank's peer info: no transport has addresses of its own.
    own_port[:] = struct.unpack("<H", blobs[1][-6:-4])
    if rank == 0:
        blobs = [blobs[0], blobs[1][:-6] + struct.pack("<H", there) + blobs[1][-4:]]
    return with_world(job, node, blobs, call)

runtime._with_world = with_world_altered
if rank == 1:
    threading.Thread(target=relay, daemon=True).start()
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


def test_an_object_that_is_altered_is_not_unpickled(start: Start) -> None:
    # A checksum stops nobody who means to change bytes, and would make this relay fail to.
    env = {"FARANDOLE_WIRE": "tcp", "FARANDOLE_WIRE_CHECKSUM": "off"}
    job = start(PROGRAM, [1, 1], env=env)
    job.finish()
    assert "plain b'harmful!'" in job.said(1), job.said(1)  # the attacker is at work
    assert "broadcast got ['harmless']" in job.said(0)
    for call in ("broadcast", "gather"):
        assert f"{call} PeerError" in job.said(1), job.said(1)
    assert "the object of rank 0 was altered" in job.said(1)
    for call in ("small", "small gather"):  # with the control messages
        assert f"{call} got ['harmless']" in job.said(1), job.said(1)
