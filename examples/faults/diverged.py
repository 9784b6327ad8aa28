# SPDX-License-Identifier: Apache-2.0
"""Each rank starts with its own random weights.

mpirun -np 2 python examples/faults/diverged.py

At the first step each rank warns once: which parameters differ, on which ranks, and the remedy.
"""

import torch

import farandole.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
# The mistake: no hvd.broadcast_parameters(model.state_dict(), root_rank=0).
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
