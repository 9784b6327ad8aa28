# SPDX-License-Identifier: Apache-2.0
"""Data and model parallelism on a 2 x 2 grid of ranks, with process sets.

    mpirun -np 4 python examples/process_grid.py             # on shared cores add --bind-to none

              model half 0   model half 1
    batch 0     rank 0         rank 1       a row holds one replica of the model, split in two
    batch 1     rank 2         rank 3       a column holds the same half, for two batches

The hidden layer of a two-layer net is divided between the ranks of a row. Each computes its half of
the hidden units and their contribution to the output; an allreduce in the row sums these. Gradients
of a half are averaged along its column. Every rank also trains the undivided net on both batches.
Expected, in a few seconds: the loss falls, and the last lines are
    loss 0.602 -> 0.043
    the grid and the undivided net agree: yes
"""

import sys

import torch
from torch import Tensor, nn

import farandole.torch as hvd

ROWS, COLUMNS = 2, 2
FEATURES, HIDDEN, BATCH, STEPS = 8, 32, 16, 80


class Summed(torch.autograd.Function):
    """Sums partial outputs over a row. All its ranks continue with the sum, so each addend has the
    gradient of the sum, and the backward pass needs no communication."""

    @staticmethod
    def forward(ctx: object, part: Tensor, row: hvd.ProcessSet) -> Tensor:
        return hvd.allreduce(part, op=hvd.Sum, name="partial output", process_set=row)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Half(nn.Module):
    """One half of the hidden units of `whole`, and their share of the output."""

    def __init__(self, whole: nn.Sequential, half: int, row: hvd.ProcessSet) -> None:
        super().__init__()
        units = slice(half * HIDDEN // COLUMNS, (half + 1) * HIDDEN // COLUMNS)
        self.row = row
        w1, b1, w2 = whole.parameters()
        self.w1 = nn.Parameter(w1[units].detach().clone())
        self.b1 = nn.Parameter(b1[units].detach().clone())
        self.w2 = nn.Parameter(w2[:, units].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.w1.T + self.b1)
        return Summed.apply(hidden @ self.w2.T, self.row)


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Inputs (BATCH, FEATURES) and targets (BATCH, 1)."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True) / 2)


def make_grid() -> tuple[int, int, hvd.ProcessSet, hvd.ProcessSet]:
    """This rank's row and column, and their process sets. Every rank registers all sets."""
    rows = [hvd.add_process_set(range(r * COLUMNS, (r + 1) * COLUMNS)) for r in range(ROWS)]
    columns = [hvd.add_process_set(range(c, ROWS * COLUMNS, COLUMNS)) for c in range(COLUMNS)]
    row, column = divmod(hvd.rank(), COLUMNS)
    return row, column, rows[row], columns[column]


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    if hvd.size() != ROWS * COLUMNS:
        sys.exit(f"this example is for 4 ranks, not {hvd.size()}: mpirun -np 4 python {__file__}")
    row, column, my_row, my_column = make_grid()

    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1, bias=False)
    whole = nn.Sequential(*layers).double()
    half = Half(whole, column, my_row)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9),
        named_parameters=half.named_parameters(),
        process_set=my_column,
    )
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)

    losses = []
    for step in range(STEPS):
        x, y = batch(step, row)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(half(x), y)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())

        pairs = [batch(step, number) for number in range(ROWS)]
        reference.zero_grad()
        joined_x, joined_y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        nn.functional.mse_loss(whole(joined_x), joined_y).backward()
        reference.step()

    expected = Half(whole, column, my_row)
    same = all(
        torch.allclose(p, q, rtol=1e-9, atol=1e-12)
        for p, q in zip(half.parameters(), expected.parameters(), strict=True)
    )
    everywhere = all(hvd.allgather_object(same))
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"the grid and the undivided net agree: {'yes' if everywhere else 'NO'}")
    sys.exit(0 if everywhere and losses[-1] < losses[0] / 4 else 1)


if __name__ == "__main__":
    main()
