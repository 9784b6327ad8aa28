# SPDX-License-Identifier: Apache-2.0
"""torch's tensor parallelism and pipeline parallelism, on farandole's backend.

    mpirun -np 2 python examples/recipes/model_parallel.py

Expected:
    tensor parallel and piped as in one process: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import parallel

dist.init_process_group("farandole")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # each rank makes the complete model and keeps its part
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
x = torch.rand(4, 8)
whole = model(x)

stage = PipelineStage(model[rank], rank, size, torch.device("cpu"))
last = ScheduleGPipe(stage, n_microbatches=2).step(*([x] if rank == 0 else []))
piped = rank < size - 1 or torch.allclose(last, whole, atol=1e-5)

mesh = init_device_mesh("cpu", (size,))
plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
divided = torch.allclose(parallel.parallelize_module(model, mesh, plan)(x), whole, atol=1e-5)
everyone = [None] * size
dist.all_gather_object(everyone, piped and divided)
if rank == 0:
    print(f"tensor parallel and piped as in one process: {all(everyone)}")
dist.destroy_process_group()
