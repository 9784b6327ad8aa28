# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer, step by step, against one process that trains on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.ranks import last
from harness.toys import assert_same, batch, joined, loss_of, network

STEPS = 4


def train_both(
    make: Callable[[Any], torch.optim.Optimizer], passes: int = 1, **options: Any
) -> None:
    """Trains on this rank's data and, alone, on everybody's; compares after each step."""
    model, reference = network(), network()
    if callable(options.get("groups")):
        options["groups"] = options["groups"](list(model.parameters()))
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    plain = make(reference.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(passes):
            loss_of(model, batch(hvd.rank(), step, part)).backward()
            loss_of(reference, joined(step, part)).backward()
        optimizer.step()
        plain.step()
        assert_same(model, reference)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_equals_joined_batch(kind: str) -> None:
    if kind == "adamw fused" and torch.__version__ < "2.4":
        pytest.skip("torch before 2.4 has no fused AdamW on CPUs")
    train_both(MAKERS[kind])


def test_accumulation() -> None:
    train_both(MAKERS["momentum"], passes=3)


@pytest.mark.parametrize("groups", [1, 2, 4, 9, lambda ps: [[ps[0], ps[3]], [ps[1]]]])
def test_groups(groups: Any) -> None:
    train_both(MAKERS["momentum"], groups=groups)


def test_predivide() -> None:
    train_both(MAKERS["momentum"], gradient_predivide_factor=2.0)
    train_both(MAKERS["momentum"], gradient_predivide_factor=2.0, groups=2)


def test_own_compression_for_some_parameters() -> None:
    class Halves:
        """Sends half of a matrix's values, exactly."""

        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, Any]:
            return (tensor / 2, tensor.shape) if tensor.dim() == 2 else (tensor, None)

        @staticmethod
        def decompress(tensor: Tensor, ctx: Any) -> Tensor:
            assert ctx in (None, tensor.shape)
            return tensor if ctx is None else tensor * 2

    train_both(MAKERS["momentum"], compression=Halves)


def test_an_error_of_any_class_in_compression_is_everyones() -> None:
    class Unusual(ValueError):
        def __init__(self, what: str, where: int) -> None:
            super().__init__(f"{what} at {where}")

    class Fails(hvd.Compression.none):
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, Any]:
            if hvd.rank() == last():
                raise Unusual("no room", 7)
            return tensor, None

    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=Fails
    )
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="no room at 7"):
            loss_of(model, batch(hvd.rank(), 0)).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_short_floats(name: str) -> None:
    model, reference = network().float(), network().float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=getattr(hvd.Compression, name)
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    own = [t.float() for t in batch(hvd.rank(), 0)]
    loss_of(model, (own[0], own[1])).backward()
    everything = [t.float() for t in joined(0)]
    loss_of(reference, (everything[0], everything[1])).backward()
    optimizer.step()
    plain.step()
    tolerance = {"fp16": 2e-3, "bf16": 1e-2}[name]
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype is torch.float32
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        if hvd.size() > 1:
            assert not torch.equal(p.grad, q.grad)  # it really was shortened


def test_sum_and_extremes() -> None:
    for op, expected in ((hvd.Sum, sum), (hvd.Min, min), (hvd.Max, max)):
        p = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=op)
        (p * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        value = expected(rank + 1.0 for rank in range(hvd.size()))  # type: ignore[operator]
        assert p.tolist() == [-value] * 3


def test_channels_last_gradients() -> None:
    model = nn.Conv2d(3, 4, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = []
    for rank in range(hvd.size()):
        generator = torch.Generator().manual_seed(rank)
        inputs.append(torch.randn(2, 3, 8, 8, generator=generator))
    ps = list(model.parameters())
    gradients = [torch.autograd.grad(model(x).square().mean(), ps) for x in inputs]
    model(inputs[hvd.rank()]).square().mean().backward()
    optimizer.synchronize()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_contiguous()
    for i, p in enumerate(ps):
        mean = torch.stack([g[i] for g in gradients]).mean(0)
        torch.testing.assert_close(p.grad, mean)


def test_sparse_gradients() -> None:
    layer = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(list(layer.parameters())), sparse_as_dense=True
    )
    rank = hvd.rank()
    layer(torch.tensor([rank, rank, 5])).sum().backward()
    optimizer.step()
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_sparse
    expected = torch.zeros(6, 2)
    for r in range(hvd.size()):
        expected[r] += 2.0 / hvd.size()
        expected[5] += 1.0 / hvd.size()
    torch.testing.assert_close(layer.weight.grad.to_dense(), expected)


def test_closure() -> None:
    model, reference = network(), network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(hvd.rank(), 0))
        loss.backward()
        return loss

    def plain_closure() -> Tensor:
        plain.zero_grad()
        loss = loss_of(reference, joined(0))
        loss.backward()
        return loss

    for _ in range(2):
        assert optimizer.step(closure).item() > 0
        plain.step(plain_closure)
        assert_same(model, reference)
    optimizer.step(closure=closure)
    plain.step(plain_closure)
    assert_same(model, reference)
