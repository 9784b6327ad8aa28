# SPDX-License-Identifier: Apache-2.0
"""Rank 1 stays in its own code, and rank 0 waits for it.

mpirun -np 2 python examples/faults/hang.py

After 2 seconds rank 0 prints that rank 1 is missing in 'loss', and in which line it is. After 4
seconds it raises StallError with the same text, and MPI ends the job.
"""

import os
import time

import numpy as np

import farandole as hvd

os.environ.setdefault("FARANDOLE_STALL_WARN", "2")  # 10 by default
os.environ.setdefault("FARANDOLE_STALL_ABORT", "4")  # 300 by default
hvd.init()
for step in range(10):
    time.sleep(0.1)  # computes
    if hvd.rank() == 1 and step == 5:  # the mistake
        time.sleep(3600)
    hvd.allreduce(np.ones(4), name="loss")
