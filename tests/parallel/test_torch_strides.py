# SPDX-License-Identifier: Apache-2.0
"""Memory layout: gradients and state that farandole hands to torch have the strides of their
parameters, which torch's fused kernels need; against training in one process by torch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole as fd
import farandole.torch as hvd
from farandole.commits import read_commit, write_commit
from farandole.torch import elastic

SHAPES = [(4, 3, 2, 5), (2, 3, 2, 2, 2), (5, 4), (2, 3, 4), (3, 1, 2, 2), (6,), ()]
# Same shapes, other strides.
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.to(memory_format=torch.channels_last),
    lambda x: x.to(memory_format=torch.channels_last_3d),
    lambda x: x.t().contiguous().t(),
    lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    lambda x: x.to(memory_format=torch.channels_last),
    lambda x: x,
    lambda x: x,
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, fused=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
}


def values(seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.rand(SHAPES[number], generator=generator) + 0.5


def parameters(turned: bool) -> list[nn.Parameter]:
    """Equal on all ranks; `turned`: with unusual strides."""
    xs = [values(0, i) for i in range(len(SHAPES))]
    pairs = zip(LAYOUTS, xs, strict=True)
    return [nn.Parameter(turn(x) if turned else x) for turn, x in pairs]


def has(rank: int, step: int, number: int) -> bool:
    """Whether the rank has a gradient for that parameter; in step 0 it has all."""
    return step == 0 or (rank + step + number) % 3 != 0


def backward(ps: Sequence[Tensor], rank: int, step: int) -> None:
    """A pass whose gradients are p * data, rounded equally in whatever order."""
    seed = 1 + rank + 10 * step
    losses = [(p * p * values(seed, i)).sum() for i, p in enumerate(ps) if has(rank, step, i)]
    torch.stack(losses).sum().backward()


def reference(make: Any, steps: Sequence[int], ranks: int) -> list[Tensor]:
    """Trained in one process by torch alone: step 0 is that of rank 0, the others are common."""
    ps = parameters(turned=True)
    optimizer = make(ps)
    for step in steps:
        sums: list[Tensor | None] = [None] * len(ps)
        for rank in range(ranks if step else 1):
            optimizer.zero_grad()
            backward(ps, rank, step)
            for i, p in enumerate(ps):
                if p.grad is not None:
                    before = sums[i]
                    sums[i] = p.grad if before is None else before + p.grad
        for p, total in zip(ps, sums, strict=True):
            p.grad = None if total is None else total / (ranks if step else 1)
        optimizer.step()
    return [p.detach() for p in ps]


def steps(x: Tensor) -> list[int]:
    """The strides that matter to the order of elements, by which alone torch goes."""
    return [step for step, n in zip(x.stride(), x.shape, strict=True) if n != 1]


def check_strides(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p].items()
            tensors = {key: x for key, x in state if isinstance(x, Tensor) and x.shape == p.shape}
            if p.grad is not None:
                tensors["grad"] = p.grad
            for name, x in tensors.items():
                assert steps(x) == steps(torch.empty_like(p)), (name, p.shape)


def same_on_all_ranks(ps: Sequence[Tensor]) -> None:
    mine = [x.tolist() for x in ps]
    assert all(theirs == mine for theirs in fd.allgather_object(mine))


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_broadcast_to_ranks_without_state(kind: str, turned: bool) -> None:
    """`turned`: the root's parameters, too, have unusual strides."""
    ps = parameters(turned or fd.rank() != 0)
    optimizer = OPTIMIZERS[kind](ps)
    if fd.rank() == 0:
        backward(ps, 0, 0)
        optimizer.step()
        optimizer.state[ps[0]]["rows"] = torch.rand(3, 2).t()  # not of the parameter's shape
        optimizer.zero_grad()
    hvd.broadcast_parameters(ps, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    check_strides(optimizer)
    assert optimizer.state[ps[0]]["rows"].stride() == (1, 2)
    backward(ps, 0, 0)
    optimizer.step()
    same_on_all_ranks(ps)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_elastic_state(kind: str, tmp_path: Path) -> None:
    """From a commit on the disk, and after the parameters have got other strides."""
    ps = parameters(turned=True)
    optimizer = OPTIMIZERS[kind](ps)
    backward(ps, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    average = ps[0].detach().clone()
    state = elastic.TorchState(optimizer=optimizer, average=average)
    wanted = copy.deepcopy(optimizer.state_dict())
    write_commit(tmp_path / "kept" / "call", state.saved())
    for turned in (True, False):
        for p, other in zip(ps, parameters(turned), strict=True):
            p.data = other.data
        read = read_commit(tmp_path / "kept" / "call", state.saved())
        assert read is not None
        state.restore_from(read)
        check_strides(optimizer)
        torch.testing.assert_close(optimizer.state_dict(), wanted, rtol=0, atol=0)
        assert state.average.stride() == average.stride()
