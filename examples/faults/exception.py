# SPDX-License-Identifier: Apache-2.0
"""Rank 1 raises an exception.

mpirun -np 2 python examples/faults/exception.py

Rank 0 raises PeerError at once, with the type and the text of rank 1's exception.
"""

import numpy as np

import farandole as hvd

hvd.init()
for step in range(10):
    if hvd.rank() == 1 and step == 5:
        raise ValueError("image 4711 is empty")
    hvd.allreduce(np.ones(4), name="loss")
