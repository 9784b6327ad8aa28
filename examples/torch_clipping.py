# SPDX-License-Identifier: Apache-2.0
"""A plain loop that clips, logs and accumulates gradients, as in one process.

    mpirun -np 4 python examples/torch_clipping.py           # or -np 2, or under torchrun
    python examples/torch_clipping.py                        # one rank

When backward() returns, `.grad` holds the average of all ranks, as with PyTorch's DDP. Expected on
up to 16 ranks, in seconds:

    parameters identical on all ranks: yes
    equal to one process with all data: yes
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import farandole.torch as hvd

STEPS, HALF = 40, 720  # HALF: images per backward pass, on all ranks; a step has two


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def train(optimizer: torch.optim.Optimizer, model: nn.Module, share: slice) -> list[float]:
    """Trains on a share of each half of the digits. Returns the norms before clipping."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for half in (slice(0, HALF), slice(HALF, 2 * HALF)):
            output = model(images[half][share])
            (F.cross_entropy(output, labels[half][share]) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.25)))
        optimizer.step()
    return norms


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = build_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    norms = train(optimizer, model, slice(hvd.rank(), None, hvd.size()))

    alone = build_model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    expected = train(reference, alone, slice(None))
    everywhere = hvd.allgather(flat(model).unsqueeze(0))
    identical = bool((everywhere == everywhere[0]).all())
    equal = torch.allclose(flat(model), flat(alone), atol=1e-4)
    equal &= torch.allclose(torch.tensor(norms), torch.tensor(expected), rtol=1e-3)
    if hvd.rank() == 0:
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
        print(f"equal to one process with all data: {'yes' if equal else 'NO'}")


if __name__ == "__main__":
    main()
