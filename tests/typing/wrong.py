# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a user's program. test_types.py lets type checkers read it: they complain about each
line that ends with `# wrong`, and about no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import farandole.elastic
import farandole.torch as hvd

x = torch.ones(3)
y = np.ones(3)

# A misspelled argument.
hvd.allreduce(x, nam=3)  # wrong
hvd.allreduce(tensor=x, nam=3)  # wrong
hvd.allreduce_(x, nam=3)  # wrong
hvd.allreduce_async(x, nam=3)  # wrong
hvd.allreduce_async(tensor=x, nam=3)  # wrong
hvd.broadcast_(tensor=x, root_rank=0, nam=3)  # wrong
hvd.allreduce_async(x, tensor=x)  # wrong
hvd.grouped_allreduce([x], nam=3)  # wrong
hvd.allgather(x, nam=3)  # wrong
hvd.broadcast(x, 0, nam=3)  # wrong
hvd.broadcast_(x, 0, nam=3)  # wrong
hvd.reducescatter(x, nam=3)  # wrong
hvd.alltoall(x, nam=3)  # wrong
hvd.barrier(nam=3)  # wrong
farandole.allreduce(y, nam=3)  # wrong
farandole.broadcast_async_(y, 0, nam=3)  # wrong

# An argument of the wrong type, one too few, one too many.
hvd.allreduce(3.0)  # wrong
hvd.allreduce(x, name=3)  # wrong
hvd.allreduce(x, op="sum")  # wrong
hvd.allreduce()  # wrong
hvd.grouped_allreduce(x)  # wrong
hvd.broadcast(x)  # wrong
hvd.broadcast(x, root_rank="0")  # wrong
hvd.synchronize(x)  # wrong
farandole.allreduce(y, "name")  # wrong
farandole.broadcast(y)  # wrong

# Elastic training.
state = hvd.elastic.TorchState(torch.nn.Linear(3, 2), torch.optim.SGD([x], lr=0.1), epoch=0)
state.optimizer.no_such_method()  # wrong


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, rate: float) -> int:
    """A loop of training."""
    return int(state.epoch * rate)


@hvd.elastic.run  # wrong
def stateless(rate: float) -> float:
    """Lacks a state."""
    return rate


@farandole.elastic.run
def train_anything(state: farandole.elastic.ObjectState) -> Any:
    """A loop of training."""
    return state.epoch


train()  # wrong
train(state)  # wrong
train(state, "fast")  # wrong
train(state, 0.1, 0.2)  # wrong
train("state", 0.1)  # wrong
train_anything(state, 3)  # wrong
