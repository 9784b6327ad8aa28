# SPDX-License-Identifier: Apache-2.0
"""send and recv inside and between two hosts, by both wires."""

from __future__ import annotations

import pytest

from harness.hosts_job import Start

# Every rank to every other, both ways at once; sizes ride along, fill a chunk, or fill many.
WORK = """
import numpy as np
import farandole as fd
fd.init()
size, rank = fd.size(), fd.rank()
sizes = [0, 1, 100, 6_000, 700_001]
def message(sender, receiver, n):
    return np.arange(n, dtype=np.float64) * (sender + 1) + receiver
for turn in range(3):
    peers = [peer for peer in range(size) if peer != rank]
    gots = {(peer, n): np.zeros(n) for peer in peers for n in sizes}
    receives = {key: fd.recv_async(got, key[0]) for key, got in gots.items()}
    sends = [fd.send_async(message(rank, peer, n), peer) for n in sizes for peer in peers]
    for handle in sends:
        handle.wait(timeout=60)
    for (peer, n), handle in receives.items():
        assert handle.wait(timeout=60) == peer
        assert (gots[peer, n] == message(peer, rank, n)).all()
    assert fd.allreduce(np.ones(1000), op=fd.Sum)[0] == size
got = np.zeros(3)
if rank > 0:
    fd.send(np.full(3, rank + 0.5), 0, tag=3)
else:
    sources = []
    for _ in range(size - 1):
        sources.append(fd.recv(got, tag=3))
        assert got.tolist() == [sources[-1] + 0.5] * 3
    assert sorted(sources) == list(range(1, size))
last = size - 1  # on the other host
if rank in (0, last):
    call = fd.send_async(np.ones(4), last) if rank == 0 else fd.recv_async(np.ones(3), 0)
    try:
        call.wait(timeout=30)
    except fd.MismatchError as error:
        assert "has 4 elements" in str(error) and "has 3 elements" in str(error), error
    else:
        raise AssertionError("two sizes met")
fd.barrier()
fd.shutdown()
print("done", rank)
"""


@pytest.mark.parametrize("wire", ["mpi", "tcp"])
def test_everybody_to_everybody(start: Start, wire: str) -> None:
    job = start(WORK, [2, 2], env={"FARANDOLE_WIRE": wire})
    assert job.finish(120).count("done") == 4
