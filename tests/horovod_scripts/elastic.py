# SPDX-License-Identifier: Apache-2.0
"""horovod.torch.elastic: a state, a sampler, and one failure on the way."""

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
data = torch.arange(24.0).reshape(24, 1) / 24
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
failures = 0


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.1


@hvd.elastic.run
def train(state):
    global failures
    for state.epoch in range(state.epoch, 3):  # noqa: B020
        for batch_idx, index in enumerate(sampler):
            optimizer.zero_grad()
            (model(data[index]) - 1).pow(2).sum().backward()
            if state.epoch == 1 and batch_idx == 2 and not failures:
                failures += 1
                # Every rank waits for a tensor that nobody else knows: a real stall.
                hvd.synchronize(hvd.allreduce_async(torch.ones(1), name=f"of {hvd.rank()} alone"))
            optimizer.step()
            sampler.record_batch(batch_idx, 1)
            state.batches += 1
            if batch_idx % 2 == 1:
                state.commit()
        sampler.set_epoch(state.epoch + 1)
        state.commit()
    return "trained"


state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, epoch=0, batches=0
)
state.register_reset_callbacks([on_state_reset])
assert train(state) == "trained"
assert issubclass(hvd.PeerError, HorovodInternalError)
assert failures == 1
assert state.batches == 3 * 24 // hvd.size(), state.batches
for p in model.parameters():
    assert torch.equal(p, hvd.broadcast(p.detach(), root_rank=0))
print(f"elastic done on rank {hvd.rank()}")
