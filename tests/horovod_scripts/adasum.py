# SPDX-License-Identifier: Apache-2.0
"""Training with op=hvd.Adasum: the learning rate is that of one rank, whatever their number."""

import argparse

import horovod.torch as hvd
import torch
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
args = parser.parse_args()


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = nn.Linear(10, 1)

lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
if args.use_adasum and hvd.nccl_built() and torch.cuda.is_available():
    lr_scaler = args.batches_per_allreduce * hvd.local_size()
optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    backward_passes_per_step=args.batches_per_allreduce,
)

truth = torch.arange(10.0) / 10
generator = torch.Generator().manual_seed(1000 + hvd.rank())
for step in range(60):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(args.batches_per_allreduce):
        data = torch.randn(16, 10, generator=generator)
        loss = ((model(data).squeeze(1) - data @ truth) ** 2).mean() / args.batches_per_allreduce
        loss.backward()
        total += loss.item()
    optimizer.step()
    average = metric_average(total, "avg_loss")
    if step % 20 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {average:.4f}")

for p in model.parameters():
    assert torch.equal(p, hvd.broadcast(p.detach(), root_rank=0))
sums = hvd.allreduce(torch.tensor([1.0, -1.0]) * (1 + hvd.rank()), op=hvd.Adasum, name="direct")
expected = (1 + hvd.size()) / 2 if hvd.size() <= 2 else None
assert expected is None or torch.allclose(sums, torch.tensor([expected, -expected]))
assert average < 0.05, average
hvd.shutdown()
if hvd.is_initialized():
    raise SystemExit("still up")
print("adasum done")
