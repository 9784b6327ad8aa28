# SPDX-License-Identifier: Apache-2.0
"""Rank 1 is late for one step, and the job goes on.

mpirun -np 2 python examples/faults/slow.py

After 2 seconds rank 0 prints that rank 1 is missing in 'loss', and in which line it is. Rank 1 then
comes, and the job ends without an error.
"""

import os
import time

import numpy as np

import farandole as hvd

os.environ.setdefault("FARANDOLE_STALL_WARN", "2")  # 10 by default
hvd.init()
for step in range(10):
    time.sleep(0.1)  # computes
    if hvd.rank() == 1 and step == 5:  # the mistake: one rank loads, evaluates or saves for long
        time.sleep(4)
    hvd.allreduce(np.ones(4), name="loss")
if hvd.rank() == 0:
    print("all steps done")
