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
from harness.toys import assert_same, batch, joined, loss_of, network, pair, train_both

STEPS = 4


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


class Halves:
    """Sends half of a matrix's values, exactly."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor / 2, tensor.shape) if tensor.dim() == 2 else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        assert ctx in (None, tensor.shape)
        return tensor if ctx is None else tensor * 2


SCENARIOS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in MAKERS},
    "accumulation": {"backward_passes_per_step": 3},
    **{f"{count} groups": {"groups": count} for count in (1, 2, 4, 9)},
    "groups by hand": {},
    "predivided": {"gradient_predivide_factor": 2.0},
    "predivided groups": {"gradient_predivide_factor": 2.0, "groups": 2},
    "own compression": {"compression": Halves},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equals_joined_batch(scenario: str) -> None:
    if scenario == "adamw fused" and torch.__version__ < "2.4":
        pytest.skip("torch before 2.4 has no fused AdamW on CPUs")
    make, options = MAKERS.get(scenario, MAKERS["momentum"]), dict(SCENARIOS[scenario])
    model, reference = network(), network()
    if scenario == "groups by hand":
        ps = list(model.parameters())
        options = {"groups": [[ps[0], ps[3]], [ps[1]]]}
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), **options
    )
    plain, passes = make(reference.parameters()), options.get("backward_passes_per_step", 1)
    train_both(model, optimizer, reference, plain, range(STEPS), passes=passes)


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
    model, optimizer, reference, plain = pair(
        MAKERS["sgd"], lambda: network().float(), compression=getattr(hvd.Compression, name)
    )
    for net, (x, y) in (model, batch(hvd.rank(), 0)), (reference, joined(0)):
        loss_of(net, (x.float(), y.float())).backward()
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


def test_closure() -> None:
    model, optimizer, reference, plain = pair(MAKERS["sgd"])

    def closure_of(net: Any, stepper: Any, data: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            stepper.zero_grad()
            loss = loss_of(net, data)
            loss.backward()
            return loss

        return closure

    own = closure_of(model, optimizer, batch(hvd.rank(), 0))
    for step in (optimizer.step, optimizer.step, lambda given: optimizer.step(closure=given)):
        assert step(own).item() > 0
        plain.step(closure_of(reference, plain, joined(0)))
        assert_same(model, reference)
