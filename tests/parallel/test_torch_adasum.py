# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(op=Adasum): local steps, and the Adasum of how far they went."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from farandole.adasum import coefficients

STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return (model(x) - rank).pow(2).mean()


def combined(ways: list[Tensor]) -> Tensor:
    rows = torch.stack([way.flatten() for way in ways]).numpy()
    return torch.from_numpy(coefficients(rows @ rows.T) @ rows).reshape(ways[0].shape)


def reference(make: Any, ranks: list[int]) -> list[Tensor]:
    """The definition, all ranks in one process."""
    models = [network() for _ in ranks]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(STEPS):
        starts = [p.detach().clone() for p in models[0].parameters()]
        for rank, model, optimizer in zip(ranks, models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        sets = zip(*(m.parameters() for m in models), strict=True)
        with torch.no_grad():
            for same, start in zip(sets, starts, strict=True):
                target = start + combined([p - start for p in same])
                for p in same:
                    p.copy_(target)
    return [p.detach() for p in models[0].parameters()]


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_the_definition(kind: str) -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), model.named_parameters(), op=hvd.Adasum
    )
    assert isinstance(optimizer, getattr(torch.optim, kind))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        for p in model.parameters():
            assert torch.equal(p, hvd.broadcast(p.detach(), 0))
    wanted = reference(OPTIMIZERS[kind], list(range(hvd.size())))
    for p, target in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), target, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(3, 4)
def test_process_set() -> None:
    members = [0, 2]
    process_set = hvd.add_process_set(members)
    model = network()
    make = OPTIMIZERS["SGD"]
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), op=hvd.Adasum, process_set=process_set
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    wanted = reference(make, members if process_set.included() else [hvd.rank()])
    for p, target in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), target, rtol=1e-9, atol=1e-11)
    hvd.barrier()
    assert hvd.remove_process_set(process_set)


def test_missing_gradients_are_no_way() -> None:
    p, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([p, unused], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
    if hvd.rank() == hvd.size() - 1:
        p.sum().backward()
    optimizer.step()
    assert p.tolist() == [0.0] * 3
    assert unused.tolist() == [1.0] * 2


def test_compression_and_closures() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), op=hvd.Adasum, compression=hvd.Compression.fp16
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p - 1).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == -2.0
    assert p.tolist() == [-1.0, -1.0]  # equal ways are averaged


def test_what_makes_no_sense_is_refused() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Adasum)
    if hvd.size() > 1:
        with pytest.raises(NotImplementedError, match="step"), optimizer.skip_synchronize():
            optimizer.step()
    optimizer.synchronize()  # nothing to do


def scaled() -> tuple[nn.Parameter, Any, Any]:
    """A parameter, its optimizer and a GradScaler."""
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this torch has no GradScaler for CPUs")
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Adasum)
    return p, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0)


def test_a_grad_scaler_is_refused_on_all_ranks() -> None:
    """It would skip the steps of a rank that has found infinities, while the others wait."""
    p, optimizer, scaler = scaled()
    if hvd.size() > 1:
        scaler.scale((p * (1.0 if hvd.rank() else float("inf"))).sum()).backward()
        with pytest.raises(NotImplementedError, match="bfloat16"):
            scaler.step(optimizer)
        optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    assert p.tolist() == [-1.0] * 2


@pytest.mark.ranks(2, 3)
def test_a_grad_scaler_on_one_rank_is_refused_on_all() -> None:
    """The others have made their own step, so they leave the job."""
    p, optimizer, scaler = scaled()
    if hvd.rank() == 0:
        scaler.scale((p * 3).sum()).backward()
        with pytest.raises(NotImplementedError, match="bfloat16"):
            scaler.step(optimizer)
        assert p.tolist() == [0.0] * 2
    else:
        (p * hvd.rank()).sum().backward()
        with pytest.raises(ValueError, match=r"rank 0 refused: NotImplementedError: .*bfloat16"):
            optimizer.step()
    with pytest.raises((hvd.ShutdownError, hvd.PeerError), match=r"left the job|rank \d left"):
        hvd.allreduce(p.detach())
    hvd.shutdown()
    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_init_again_and_a_learning_rate_schedule() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Adasum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
        scheduler.step()
        hvd.shutdown()
        hvd.init()
    assert p.tolist() == [-1.5, -1.5]
