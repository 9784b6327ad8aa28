# SPDX-License-Identifier: Apache-2.0
"""A user's program that says which types it expects. Type checkers read it in
tests/single/test_types.py; tests/parallel/test_public.py runs it as a world of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import assert_type

import farandole.elastic
import farandole.torch as hvd

hvd.init()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
assert_type(optimizer, torch.optim.SGD)
state = hvd.elastic.TorchState(model, optimizer, epoch=1, rates=[0.1])
assert_type(state.model, torch.nn.Linear)
assert_type(state.optimizer, torch.optim.SGD)
state.epoch += 1
other = hvd.elastic.TorchState(model, optimizer)
assert isinstance(optimizer, hvd.ReducingOptimizer)
optimizer.set_backward_passes_per_step(1)
with optimizer.no_sync():
    model(torch.ones(4, 3)).sum().backward()
model(torch.ones(4, 3)).sum().backward()
optimizer.synchronize()
with optimizer.skip_synchronize():
    optimizer.step()
optimizer.zero_grad(set_to_none=False)
torch.optim.lr_scheduler.StepLR(optimizer, 3)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
if TYPE_CHECKING:  # the ignored errors must be there
    optimizer.no_such_method()  # type: ignore[attr-defined] # pyright: ignore

x = torch.arange(4.0)
assert_type(hvd.allreduce_async(x), hvd.Handle[torch.Tensor])
assert_type(hvd.allreduce_async(tensor=x, name="y", op=hvd.Sum), hvd.Handle[torch.Tensor])
assert_type(hvd.allreduce_async_(tensor=x.clone()), hvd.Handle[torch.Tensor])
assert_type(hvd.broadcast_async(tensor=x, root_rank=0), hvd.Handle[torch.Tensor])
assert_type(hvd.allgather_async(tensor=x), hvd.Handle[torch.Tensor])
assert_type(hvd.reducescatter_async(tensor=x), hvd.Handle[torch.Tensor])
assert_type(hvd.allreduce_(tensor=x.clone()), torch.Tensor)
assert_type(hvd.broadcast_(tensor=x.clone(), root_rank=0), torch.Tensor)
assert_type(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), torch.Tensor)
assert_type(hvd.synchronize(hvd.grouped_allreduce_async([x, x])), list[torch.Tensor])
assert_type(hvd.allreduce(x), torch.Tensor)
assert_type(hvd.allreduce(tensor=x, name="x", op=hvd.Sum), torch.Tensor)
assert_type(hvd.grouped_allreduce([x]), list[torch.Tensor])
assert_type(hvd.alltoall(x), torch.Tensor)
assert_type(hvd.alltoall(x, splits=[4]), tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.broadcast_object(3), int)
assert_type(hvd.allgather_object("a"), list[str])
assert_type(hvd.join(), int)

Doubles = np.ndarray[Any, np.dtype[np.float64]]
y: Doubles = np.arange(4.0)
assert_type(farandole.allreduce(y), Doubles)
assert_type(farandole.allreduce(tensor=y), Doubles)
assert_type(farandole.broadcast_(tensor=y, root_rank=0), Doubles)
assert_type(farandole.alltoall(y), Doubles)
assert_type(farandole.alltoall(y, splits=[4]), tuple[Doubles, np.ndarray[Any, np.dtype[np.int64]]])
assert_type(farandole.broadcast_object({"epoch": 1}), dict[str, int])

objects = farandole.elastic.ObjectState(epoch=3)
objects.epoch += 1


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, rate: float) -> int:
    """A loop of training."""
    return int(state.epoch * rate)


@farandole.elastic.run
def count(state: farandole.elastic.ObjectState) -> int:
    """A loop of training."""
    return int(state.epoch)


@hvd.elastic.run
def train_linear(state: hvd.elastic.TorchState[torch.nn.Linear, torch.optim.SGD]) -> int:
    """A loop of training."""
    return state.model.out_features


assert_type(train(state, rate=2.0), int)
assert_type(train_linear(other), int)
assert_type(count(objects), int)
hvd.shutdown()
