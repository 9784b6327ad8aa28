# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate on farandole takes one line, before the Accelerator is made.

    pip install accelerate scikit-learn
    python examples/accelerate_digits.py --save one.pt               # one process, batches of 64
    mpirun -np 4 python examples/accelerate_digits.py --compare one.pt      # batches of 64 / 4

Expected on 2 or 4 ranks, in well under a minute:

    test accuracy 0.9...
    parameters identical on all ranks: yes
    equal to one process with all data: yes
"""

import torch
from accelerate import Accelerator
from proof import parse_arguments, prove
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import farandole.torch as hvd

BATCH, TRAINED = 64, 1536  # images per step, over all ranks; training images (the rest test)


def main() -> None:
    options = parse_arguments(__doc__.splitlines()[0], epochs=10)
    hvd.init()
    if hvd.size() > 1:
        torch.distributed.init_process_group("farandole")  # Accelerate finds it, and uses DDP
    accelerator = Accelerator(cpu=True)
    digits = load_digits()
    torch.manual_seed(0)
    order = torch.randperm(len(digits.target))  # the same on all ranks
    images = torch.tensor(digits.data).float()[order] / 16
    labels = torch.tensor(digits.target)[order]
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    data = TensorDataset(images[:TRAINED], labels[:TRAINED])
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        DataLoader(data, batch_size=BATCH // hvd.size()),
    )
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    with torch.no_grad():
        right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
    accelerator.print(f"test accuracy {right:.4f}")
    prove(accelerator.unwrap_model(model), options)


if __name__ == "__main__":
    main()
