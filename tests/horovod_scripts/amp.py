# SPDX-License-Identifier: Apache-2.0
"""Mixed precision with clipping, as Horovod's users write it: synchronize, unscale, clip, skip."""

import argparse
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

features = torch.randn(240, 16)
labels = (features[:, :8].sum(1) > features[:, 8:].sum(1)).long()
train_dataset = TensorDataset(features, labels)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=20, sampler=train_sampler, num_workers=1)

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

losses = []
for epoch in range(args.epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(hvd.allreduce(loss.detach().float(), name="avg_loss").item())

flat = torch.cat([p.detach().flatten() for p in model.parameters()])
same = all(torch.equal(flat, other) for other in hvd.allgather_object(flat))
if hvd.rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, parameters equal: {same}")
sys.exit(0 if same and losses[-1] < losses[0] else 1)
