# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 1: each rank keeps the optimizer state of its share of the parameters.

    mpirun -np 2 python examples/recipes/zero.py

Expected on any number of ranks:

    parameters equal on all ranks: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import farandole.torch  # noqa: F401  # needed before torch 2.5 only

dist.init_process_group("farandole")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own data
for _ in range(10):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x) - x[:, :2].sin()).square().mean().backward()
    optimizer.step()
optimizer.consolidate_state_dict(to=0)  # then rank 0's optimizer.state_dict() is complete

own = nn.utils.parameters_to_vector(model.parameters()).detach()
everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, own)
if dist.get_rank() == 0:
    print("parameters equal on all ranks:", all(torch.equal(own, x) for x in everywhere))
dist.destroy_process_group()
