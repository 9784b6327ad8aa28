# SPDX-License-Identifier: Apache-2.0
"""Rank 0 alone makes a call.

mpirun -np 2 python examples/faults/one_rank.py

Rank 0 raises PeerError when rank 1 has left without making it.
"""

import numpy as np

import farandole as hvd

hvd.init()
loss = np.ones(1)
hvd.allreduce(loss, name="loss")
if hvd.rank() == 0:  # the mistake: all ranks must make the call, and one prints
    print(hvd.allreduce(loss, name="mean loss"))
