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
from harness.ranks import last

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


TURNED = {
    "all": lambda: True,
    "one": lambda: fd.rank() == last(),
    "the root": lambda: not fd.rank(),
}


@pytest.mark.parametrize("turned", TURNED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_after_a_broadcast(kind: str, turned: str) -> None:
    """The root alone has state; then ranks in turn have no gradient."""
    ps = parameters(TURNED[turned]())
    make = OPTIMIZERS[kind]
    optimizer = make(ps)
    if fd.rank() == 0:
        backward(ps, 0, 0)
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_parameters(ps, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    check_strides(optimizer)
    distributed = hvd.DistributedOptimizer(optimizer)
    for step in range(1, 4):
        backward(ps, fd.rank(), step)
        check_strides(optimizer)
        distributed.step()
        distributed.zero_grad()
        if turned == "all":  # else torch's kernels round in other ways
            same_on_all_ranks(ps)
    for p, wanted in zip(ps, reference(make, range(4), fd.size()), strict=True):
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-5, atol=1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "fp16": {"compression": hvd.Compression.fp16},
    "two passes": {"backward_passes_per_step": 2},
    "sparse as dense": {"sparse_as_dense": True},
}


@pytest.mark.ranks(2, 3, 4)  # a rank alone reduces nothing
@pytest.mark.parametrize("turned", TURNED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_have_the_strides_of_autograd(variant: str, turned: str) -> None:
    """Also where a rank has none, and where the user has set some in another form."""
    ps = parameters(TURNED[turned]())
    ps += [nn.Parameter(torch.zeros(4, 6)[:, ::2]), nn.Parameter(torch.zeros(6, 4).t())]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=0.0), **VARIANTS[variant])
    for step in range(1, 4):
        for _ in range(optimizer.backward_passes_per_step):
            backward(ps[: len(SHAPES)], fd.rank(), step)
        optimizer.zero_grad()
        if step == 2:  # of what the user has made
            for p in ps[: -1 if fd.rank() else len(ps)]:
                other = torch.empty(p.shape[::-1]).permute([*range(p.dim())][::-1]).stride()
                form = other if fd.rank() == last() else torch.empty(p.shape).stride()
                p.grad = torch.empty_strided(p.shape, form).fill_(fd.rank() + 1.0)
            optimizer.synchronize()
            for p in ps:
                alone = torch.empty_strided(p.shape, p.stride()).requires_grad_()
                (alone * 2).sum().backward()
                assert p.grad is not None
                assert alone.grad is not None
                assert steps(p.grad) == steps(alone.grad), p.shape
                wanted = (fd.size() + 1) / 2 if p is not ps[-1] else 1 / fd.size()
                assert torch.allclose(p.grad, torch.full(p.shape, wanted), rtol=1e-3)
            optimizer.step()
            optimizer.zero_grad()


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


needs_grad_dtype = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="needs torch 2.10")


class Precise(torch.autograd.Function):
    """The sum of a tensor, times a factor; its gradient is float32, whatever the tensor is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.form = x.shape, factor
        return x.float().sum() * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape, factor = ctx.form
        return torch.full(shape, factor) * grads[0], None


@needs_grad_dtype
@pytest.mark.parametrize("variant", [*VARIANTS, "plain"])
def test_gradients_of_another_dtype(variant: str) -> None:
    """float32 gradients of bfloat16 parameters are reduced as such; a rank may have none."""
    ps = [nn.Parameter(torch.full((4, 3), 0.5, dtype=torch.bfloat16)) for _ in range(3)]
    for p in ps:
        p.grad_dtype = torch.float32
    options = VARIANTS.get(variant, {})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **options)
    for _ in range(optimizer.backward_passes_per_step):
        used = ps[: 2 if fd.rank() else 3]
        exact = 1 + (1 + fd.rank()) * 2.0**-10  # float16 holds it, bfloat16 does not
        torch.stack([Precise.apply(p, exact) for p in used]).sum().backward()
    passes, n = optimizer.backward_passes_per_step, fd.size()
    optimizer.synchronize()
    for i, p in enumerate(ps):
        total = sum(1 + (1 + r) * 2.0**-10 for r in range(n if i < 2 else 1))
        assert p.grad is not None
        assert p.grad.dtype is torch.float32
        torch.testing.assert_close(
            p.grad, torch.full((4, 3), passes * total / n), rtol=1e-3, atol=0
        )
        if variant != "fp16" and n == 2:
            assert p.grad.flatten()[0] == passes * total / n
    optimizer.step()
    same_on_all_ranks([p.detach() for p in ps])


@needs_grad_dtype
@pytest.mark.parametrize("late", [True, False])
def test_sparse_gradients_of_another_dtype(late: bool) -> None:
    """`late`: one rank has none in the first pass."""
    torch.manual_seed(7)
    table = nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    table.weight.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    rows = torch.tensor([fd.rank()] if fd.rank() or not late else [], dtype=torch.long)
    table(rows).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.dtype is torch.float32
    want = torch.zeros(5, 3)
    want[int(late) : fd.size()] = 1 / fd.size()
    torch.testing.assert_close(table.weight.grad.to_dense(), want, rtol=1e-6, atol=0)
    optimizer.step()
