# SPDX-License-Identifier: Apache-2.0
"""The ranks make two blocking calls in different orders.

mpirun -np 2 python examples/faults/order.py

After 2 seconds both ranks raise StallError. Its first line names both calls and their lines.
"""

import os

import numpy as np

import farandole as hvd

os.environ.setdefault("FARANDOLE_STALL_WARN", "2")  # 10 by default
hvd.init()
metrics = {"loss": np.ones(1), "accuracy": np.ones(1)}
for name in sorted(metrics, reverse=hvd.rank() == 1):  # the mistake
    hvd.allreduce(metrics[name], name=name)
