# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: every rank writes its part; any number of ranks reads it.

    mpirun -np 2 python examples/recipes/distributed_checkpoint.py

Expected on any number of ranks; run it twice to continue from its folder:

    parameters equal on all ranks: True
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import farandole.torch  # noqa: F401  # needed before torch 2.5 only

FOLDER = Path("recipe_checkpoint")

dist.init_process_group("farandole")
model = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
if (FOLDER / ".metadata").exists():
    dcp.load(parts, checkpoint_id=FOLDER)
    states = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}
    set_state_dict(model, optimizer, **states)
model(torch.rand(4, 8) + dist.get_rank()).square().mean().backward()  # each rank has its own data
optimizer.step()
parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(parts, checkpoint_id=FOLDER)
everywhere = [None] * dist.get_world_size()
dist.all_gather_object(everywhere, [p.tolist() for p in model.parameters()])
if dist.get_rank() == 0:
    print("parameters equal on all ranks:", everywhere.count(everywhere[0]) == len(everywhere))
dist.destroy_process_group()
