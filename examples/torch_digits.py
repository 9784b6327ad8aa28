# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional net on handwritten digits from scikit-learn; downloads nothing.

    mpirun -np 4 python examples/torch_digits.py             # or -np 2
    python examples/torch_digits.py                          # one rank
    mpirun -np 2 python examples/torch_digits.py --resume    # continues from the checkpoint
    mpirun -np 2 python examples/torch_digits.py --tensorboard runs --timeline digits.json

Expected on 1, 2 or 4 ranks, in well under a minute each: a test accuracy of at least 0.97, and the
last lines
    test accuracy 0.9...
    parameters identical on all ranks: yes
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import farandole.torch as hvd

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BATCH = 32  # on each rank
BASE_LR = 0.05  # for one rank
WARMUP_EPOCHS = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint", type=Path, default=Path("torch_digits.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument(
        "--tensorboard", type=Path, help="folder for curves and farandole's metrics"
    )
    parser.add_argument("--timeline", type=Path, help="file for a trace that Perfetto can show")
    return parser.parse_args()


def open_writer(folder: Path | None) -> "SummaryWriter | None":
    """A writer on rank 0 if there is a folder, else None."""
    if folder is None or hvd.rank() != 0:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images for training, 360 for the test: (1, 8, 8) float32 in [0, 1], labels 0 to 9."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def learning_rate(epoch: float, epochs: int) -> float:
    """Rises from one rank's rate to that for all ranks' batches together, then falls to 0."""
    warmth = min(1.0, epoch / WARMUP_EPOCHS)
    scale = 1.0 + warmth * (hvd.size() - 1.0)
    return BASE_LR * scale * 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))


def train_epoch(
    epoch: int, epochs: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> float:
    """The mean loss over all ranks."""
    model.train()
    total = torch.zeros(())
    bar = tqdm(loader, desc=f"epoch {epoch:2}", disable=hvd.rank() != 0, leave=False)
    for i, (images, labels) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + i / len(loader), epochs)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return hvd.allreduce(total / len(loader), name="loss").item()


@torch.no_grad()
def test_accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Accuracy on the whole test set. Each rank computes a part."""
    model.eval()
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data.tensors)
    correct = (model(images).argmax(1) == labels).sum()
    return hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / len(data)


def identical_on_all_ranks(model: nn.Module) -> bool:
    """Compares parameters only: BatchNorm's running statistics differ by rank."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    lowest, highest = hvd.allreduce(flat, op=hvd.Min), hvd.allreduce(flat, op=hvd.Max)
    return torch.equal(lowest, highest)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the net is tiny; in general, at most the number of cores per rank

    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_data, BATCH, sampler=sampler, num_workers=1, persistent_workers=True)

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    first_epoch = 0
    if arguments.resume and hvd.rank() == 0:  # the other ranks get everything below
        checkpoint = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    writer = open_writer(arguments.tensorboard)
    if arguments.timeline is not None:
        hvd.start_timeline(arguments.timeline)
    torch.manual_seed(1 + hvd.rank())  # each rank has its own dropout
    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(epoch, arguments.epochs, model, optimizer, loader)
        accuracy = test_accuracy(model, test_data)
        if writer is not None:
            writer.add_scalar("loss", loss, epoch)
            for name, value in hvd.metrics().items():
                writer.add_scalar(f"farandole/{name}", value, epoch)
        if hvd.rank() == 0:
            print(f"epoch {epoch:2}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, arguments.checkpoint)

    hvd.stop_timeline()
    if writer is not None:
        writer.close()
    accuracy = test_accuracy(model, test_data)
    identical = identical_on_all_ranks(model)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f}")
        print(f"parameters identical on all ranks: {'yes' if identical else 'no'}")


if __name__ == "__main__":
    main()
