# SPDX-License-Identifier: Apache-2.0
"""Trains on digits with a meeting of the ranks every 20 steps: DiLoCo, for slow links.

    mpirun -np 2 python examples/torch_diloco.py             # or -np 4
    mpirun -np 2 python examples/torch_diloco.py --outer average      # Local SGD
    python examples/torch_diloco.py                          # alone: a world of one

Each rank has its own part of the images, and between two meetings nothing is sent. Synchronous
training would send a gradient in each step, so 20 times as many bytes.

Expected with each outer optimizer, in well under a minute on a free machine: a test accuracy
of 0.95 at least, and the last lines
    test accuracy 0.9...
    parameters identical on all ranks: yes
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import farandole.torch as hvd

EVERY, STEPS, BATCH = 20, 400, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outer", choices=["nesterov", "average"], default="nesterov")
    kind = parser.parse_args().outer
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    x, x_test, y, y_test = train_test_split(images, labels, stratify=labels, random_state=0)
    x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = AdamW(model.parameters(), lr=2e-3)
    outer = {
        "nesterov": lambda: SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
        "average": lambda: None,
    }[kind]()
    diloco = hvd.DiLoCo(model.named_parameters(), outer, every=EVERY)
    draw = torch.Generator().manual_seed(hvd.rank())
    before = hvd.metrics()["bytes_done"]
    for _ in range(STEPS):
        batch = torch.randint(len(x), (BATCH,), generator=draw)
        inner.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        inner.step()
        diloco.step()
    moved = hvd.metrics()["bytes_done"] - before

    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = hvd.allgather(own.unsqueeze(0))
    identical = bool((everywhere == everywhere[0]).all())
    if hvd.rank() == 0:
        with torch.no_grad():
            right = (model(x_test).argmax(1) == y_test).float().mean().item()
        print(f"{moved / STEPS / 1e3:.1f} KB a step; a gradient has {own.nbytes / 1e3:.1f} KB")
        print(f"test accuracy {right:.4f}")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")


if __name__ == "__main__":
    main()
