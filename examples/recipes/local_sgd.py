# SPDX-License-Identifier: Apache-2.0
"""Local SGD: ranks train separately, and average their parameters every few steps.

    mpirun -np 2 python examples/recipes/local_sgd.py

Expected on any number of ranks:

    parameters equal on all ranks: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import farandole.torch  # noqa: F401  # needed before torch 2.5 only

PERIOD, STEPS = 4, 13  # the averager meets after steps 1, 5, 9 and 13

dist.init_process_group("farandole")
torch.manual_seed(0)  # the same first weights on all ranks
model = nn.Linear(8, 2)
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=PERIOD, warmup_steps=0))

torch.manual_seed(1 + dist.get_rank())  # each rank has its own data
for _ in range(STEPS):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x) - x[:, :2].sin()).square().mean().backward()
    optimizer.step()

own = nn.utils.parameters_to_vector(model.parameters()).detach()
everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, own)
if dist.get_rank() == 0:
    print("parameters equal on all ranks:", all(torch.equal(own, x) for x in everywhere))
dist.destroy_process_group()
