# SPDX-License-Identifier: Apache-2.0
"""The ranks have models of different sizes.

mpirun -np 2 python examples/faults/mismatch.py

Both ranks raise MismatchError at once. It names the parameter, both shapes and their ranks.
"""

import torch

import farandole.torch as hvd

hvd.init()
classes = 10 + hvd.rank()  # the mistake: each rank counts the classes of its own data
model = torch.nn.Linear(4, classes, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
