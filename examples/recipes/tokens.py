# SPDX-License-Identifier: Apache-2.0
"""Unequal batches: every token has the same weight, as in one process.

    mpirun -np 2 python examples/recipes/tokens.py

Expected on any number of ranks:

    parameters equal on all ranks: True
    equal to one process with all tokens: True
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farandole.torch as hvd

hvd.init()
torch.manual_seed(0)  # the same first weights and data on all ranks
model, alone = nn.Embedding(16, 16), nn.Embedding(16, 16)
alone.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
reference = torch.optim.SGD(alone.parameters(), lr=0.5)
for _ in range(5):
    texts = [torch.randint(16, (4 + 3 * rank,)) for rank in range(hvd.size())]
    own = texts[hvd.rank()]  # rank 0 has 4 tokens, rank 1 has 7
    tokens = hvd.allreduce(torch.tensor(float(len(own))), op=hvd.Sum)
    optimizer.zero_grad()
    (cross_entropy(model(own), own) * len(own) * hvd.size() / tokens).backward()
    optimizer.step()
    reference.zero_grad()
    cross_entropy(alone(torch.cat(texts)), torch.cat(texts)).backward()
    reference.step()
everywhere = hvd.allgather(model.weight.detach()[None])
if hvd.rank() == 0:
    print("parameters equal on all ranks:", bool((everywhere == everywhere[0]).all()))
    print("equal to one process with all tokens:", torch.allclose(model.weight, alone.weight))
