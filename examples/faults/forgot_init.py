# SPDX-License-Identifier: Apache-2.0
"""init() is never called, so each rank trains its own model.

mpirun -np 2 python examples/faults/forgot_init.py

At the first step each process warns that it has not met the others, and names the remedy.
"""

import torch

import farandole.torch as hvd  # noqa: F401

# The mistake: no hvd.init().
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
