# SPDX-License-Identifier: Apache-2.0
"""Trains on digits although every rank has a different amount of data, for several epochs.

    mpirun -np 2 python examples/torch_uneven.py             # or -np 4
    python examples/torch_uneven.py                          # one rank

Rank r has r + 1 shares of the images, so low ranks run out of batches first. They call join(), and
the others continue without them. Then all ranks take the model and the optimizer state of the rank
that was last, and start the next epoch together.

Expected on 1, 2 or 4 ranks, in well under a minute each: a test accuracy of at least 0.93, and the
last lines
    test accuracy 0.9...
    parameters identical on all ranks: yes
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import farandole.torch as hvd

BATCH = 32


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images for training, 360 for the test: (64,) float32 in [0, 1], labels 0 to 9."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def own_part(data: TensorDataset) -> Subset:
    """r + 1 shares of the data for rank r."""
    shares = [rank for rank in range(hvd.size()) for _ in range(rank + 1)]
    return Subset(data, [i for i in range(len(data)) if shares[i % len(shares)] == hvd.rank()])


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> int:
    """Trains, and returns the rank that was the last to run out of batches."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)  # gradients are reduced already
        optimizer.step()
    return hvd.join()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    images, labels = data.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    epochs = parser.parse_args().epochs
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    train_data, test_data = load_data()
    loader = DataLoader(own_part(train_data), BATCH, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(epochs):
        last = train_epoch(model, optimizer, loader)
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        if hvd.rank() == 0:
            print(f"epoch {epoch:2}  {len(loader)} batches here, rank {last} had the most")

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    lowest, highest = hvd.allreduce(flat, op=hvd.Min), hvd.allreduce(flat, op=hvd.Max)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy(model, test_data):.4f}")
        print(f"parameters identical on all ranks: {'yes' if lowest.equal(highest) else 'no'}")


if __name__ == "__main__":
    main()
