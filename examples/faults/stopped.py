# SPDX-License-Identifier: Apache-2.0
"""Rank 1 is stopped, as by Ctrl-Z or a debugger.

mpirun -np 2 python examples/faults/stopped.py

After 2 seconds rank 0 prints that rank 1 is stopped, and how to continue it. After 4 seconds it
raises StallError.
"""

import os
import signal

import numpy as np

import farandole as hvd

os.environ.setdefault("FARANDOLE_STALL_WARN", "2")  # 10 by default
os.environ.setdefault("FARANDOLE_STALL_ABORT", "4")  # 300 by default
hvd.init()
for step in range(10):
    if hvd.rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.allreduce(np.ones(4), name="loss")
