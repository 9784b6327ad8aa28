# SPDX-License-Identifier: Apache-2.0
"""Rank 1 is killed, as by the kernel when memory runs out.

mpirun -np 2 python examples/faults/dead.py

At once a line says which process died, and rank 0 raises PeerError if MPI does not end it first.
"""

import os
import signal

import numpy as np

import farandole as hvd

hvd.init()
for step in range(10):
    if hvd.rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(4), name="loss")
