# SPDX-License-Identifier: Apache-2.0
"""Somebody between two simulated hosts who changes bytes on their way: text for the programs of
ranks."""

# relay(to, altered), before init() on all ranks of an MPI job: lower ranks call rank `to` at a port
# where its process hands on altered(data) of what they send on data lines. Control messages pass it
# by if `to` is the one that calls.
RELAY = """
import socket, struct, threading
from mpi4py import MPI
from farandole import runtime

def relay(to, altered):
    rank = MPI.COMM_WORLD.Get_rank()
    listener = socket.create_server(("", 0))
    there = MPI.COMM_WORLD.bcast(listener.getsockname()[1], to)
    own_port = []

    def pump(source, target, change):
        while data := source.recv(1 << 16):
            target.sendall(change(data))
        target.shutdown(socket.SHUT_WR)

    def serve():
        while True:
            caller, _ = listener.accept()
            callee = socket.create_connection(("127.0.0.1", own_port[0]))
            for line in ((caller, callee, altered), (callee, caller, bytes)):
                threading.Thread(target=pump, args=line, daemon=True).start()

    with_world = runtime._with_world

    def with_world_altered(job, node, blobs, *rest):
        # The port is the last field of a rank's peer info.
        blobs = list(blobs)
        own_port[:] = struct.unpack("<H", blobs[to][-2:])
        if rank < to:
            blobs[to] = blobs[to][:-2] + struct.pack("<H", there)
        return with_world(job, node, blobs, *rest)

    runtime._with_world = with_world_altered
    if rank == to:
        threading.Thread(target=serve, daemon=True).start()
"""
