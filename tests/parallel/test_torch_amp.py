# SPDX-License-Identifier: Apache-2.0
"""Clipping and automatic mixed precision: what comes between backward() and step()."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd

# torch 2.1 has no fused SGD.
FUSED = [False, True] if "fused" in inspect.signature(torch.optim.SGD).parameters else [False]


def gradient(rank: int) -> Tensor:
    return torch.tensor([3.0, 4.0]) * (1 + rank)


def mean_gradient() -> Tensor:
    return torch.stack([gradient(r) for r in range(hvd.size())]).mean(0)


def toy(**options: Any) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.zeros(2))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0, **options))


def backward(p: Tensor, scale: Any = None) -> None:
    loss = (p * gradient(hvd.rank())).sum()
    (loss if scale is None else scale.scale(loss)).backward()


@pytest.mark.parametrize("skip", [True, False])
def test_clip_as_with_horovod(skip: bool) -> None:
    p, optimizer = toy()
    for k in range(1, 3):
        optimizer.zero_grad()
        backward(p)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()  # notices by itself, and reduces nothing again
        torch.testing.assert_close(p, torch.tensor([-0.6, -0.8]) * k, rtol=1e-4, atol=1e-4)


def test_skip_synchronize_uses_local_gradients() -> None:
    p, optimizer = toy()
    p.grad = gradient(hvd.rank())
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.testing.assert_close(p, -gradient(hvd.rank()))


def scaler_of(**options: Any) -> Any:
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this torch has no GradScaler for CPUs")
    return torch.amp.GradScaler("cpu", **options)


@pytest.mark.parametrize("explicit", ["nothing", "synchronize", "unscale"])
@pytest.mark.parametrize("fused", FUSED)
def test_grad_scaler(explicit: str, fused: bool) -> None:
    p, optimizer = toy(**({"fused": True} if fused else {}))
    scaler = scaler_of(init_scale=1024.0, growth_interval=10_000)
    for k in range(1, 4):
        optimizer.zero_grad()
        backward(p, scaler)
        if explicit != "nothing":
            optimizer.synchronize()
        if explicit == "unscale":
            scaler.unscale_(optimizer)
            torch.testing.assert_close(p.grad, mean_gradient())
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(p.detach(), -mean_gradient() * k)


@pytest.mark.skipif(len(FUSED) == 1, reason="this torch has no fused SGD")
def test_a_step_before_the_reduction_is_an_error() -> None:
    """A fused optimizer steps even if the scaler has found an overflow, and looks itself."""
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    p, optimizer = toy(fused=True)
    scaler = scaler_of(init_scale=4.0)
    with optimizer.no_sync():
        backward(p, scaler)
    with pytest.raises(ValueError, match=r"call optimizer.synchronize\(\) before scaler"):
        scaler.step(optimizer)
    optimizer.synchronize()
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), -mean_gradient())


@pytest.mark.parametrize("fused", FUSED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(fused: bool) -> None:
    p, optimizer = toy(**({"fused": True} if fused else {}))
    scaler = scaler_of(init_scale=4.0, growth_interval=2)
    steps = 0
    for k in range(5):
        optimizer.zero_grad()
        backward(p, scaler)
        overflow = k in (1, 2)
        if overflow:
            optimizer.zero_grad()  # the same on all ranks: drops what is under way
            weight = float("inf") if hvd.rank() == hvd.size() - 1 else 1.0
            scaler.scale((p * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += not overflow
        torch.testing.assert_close(p.detach(), -mean_gradient() * steps)
    assert hvd.allgather_object(scaler.get_scale()) == [scaler.get_scale()] * hvd.size()


def test_autocast_bfloat16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    target = torch.randn(16, 1, generator=torch.Generator().manual_seed(hvd.rank()))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(100 + hvd.rank()))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    assert losses[-1] < losses[0]
    for p in model.parameters():
        assert p.dtype is torch.float32
        assert torch.equal(p, hvd.broadcast(p.detach(), root_rank=0))
