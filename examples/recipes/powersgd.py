# SPDX-License-Identifier: Apache-2.0
"""PowerSGD with error feedback: DDP sends two thin factors in place of each gradient.

    mpirun -np 2 python examples/recipes/powersgd.py

Expected on any number of ranks:

    parameters equal on all ranks: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farandole.torch  # noqa: F401  # needed before torch 2.5 only

dist.init_process_group("farandole")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
state = powerSGD_hook.PowerSGDState(  # the first two steps send whole gradients
    dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2
)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own data
for _ in range(10):
    optimizer.zero_grad()
    x = torch.randn(16, 64)
    (model(x) - x[:, :8].sin()).square().mean().backward()
    optimizer.step()

own = nn.utils.parameters_to_vector(model.parameters()).detach()
everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, own)
if dist.get_rank() == 0:
    print("parameters equal on all ranks:", all(torch.equal(own, x) for x in everywhere))
dist.destroy_process_group()
