# SPDX-License-Identifier: Apache-2.0
"""The optimizer is not wrapped, so each rank trains its own model.

mpirun -np 2 python examples/faults/forgot_wrap.py

At its end each rank says that it has made no collective call, and names the remedy.
"""

import torch

import farandole.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# The mistake: no hvd.DistributedOptimizer(optimizer, model.named_parameters()).
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
