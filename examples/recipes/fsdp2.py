# SPDX-License-Identifier: Apache-2.0
"""FSDP2: each rank keeps its share of parameters, gradients and optimizer state.

    mpirun -np 2 python examples/recipes/fsdp2.py        # torch 2.6 or newer

Expected on any number of ranks:

    parameters equal on all ranks: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import farandole.torch  # noqa: F401  # names the backend

dist.init_process_group("farandole")
torch.manual_seed(0)  # the same first weights on all ranks
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own data
for _ in range(10):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x) - x[:, :2].sin()).square().mean().backward()
    optimizer.step()

own = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, own)
if dist.get_rank() == 0:
    print("parameters equal on all ranks:", all(torch.equal(own, x) for x in everywhere))
dist.destroy_process_group()
