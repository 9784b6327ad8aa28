# SPDX-License-Identifier: Apache-2.0
"""A checkpoint: rank 0 writes and reads it with torch, and broadcasts its contents.

    mpirun -np 2 python examples/recipes/checkpoint.py

Expected on any number of ranks; run it twice to continue from its file:

    parameters equal on all ranks: True
"""

from pathlib import Path

import torch
from torch import nn

import farandole.torch as hvd

FILE = Path("recipe_checkpoint.pt")

hvd.init()
model = nn.Linear(8, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
if hvd.rank() == 0 and FILE.exists():
    found = torch.load(FILE, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

torch.manual_seed(1 + hvd.rank())  # each rank has its own data
for _ in range(10):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x) - x[:, :2].sin()).square().mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FILE)
everywhere = hvd.allgather(nn.utils.parameters_to_vector(model.parameters())[None].detach())
if hvd.rank() == 0:
    print("parameters equal on all ranks:", bool((everywhere == everywhere[0]).all()))
