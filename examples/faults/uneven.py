# SPDX-License-Identifier: Apache-2.0
"""Rank 1 has fewer batches, and averages its loss while rank 0 still trains.

mpirun -np 2 python examples/faults/uneven.py

After 10 seconds both ranks raise StallError. Its first line names both lines and the remedy.
"""

import torch

import farandole.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
for _ in range(10 - hvd.rank()):  # the mistake: ranks make different numbers of steps
    optimizer.zero_grad()
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
mean = hvd.allreduce(loss.detach(), name="loss")
