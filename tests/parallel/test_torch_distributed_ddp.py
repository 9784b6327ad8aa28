# SPDX-License-Identifier: Apache-2.0
"""DDP over the backend `farandole`. tests/clients has FSDP2, DTensor, ZeRO and checkpoints."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from harness.c10d import backend  # noqa: F401 (a fixture of all tests)
from harness.toys import assert_same, batch, joined, loss_of, network, train, train_both

pytestmark = [
    pytest.mark.ranks(2, 4),
    # Of torch before 2.13, about itself.
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
SMALL = 1e-4  # MB: several buckets


def ddp_of(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, bucket_cap_mb=SMALL, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler on itself
@pytest.mark.parametrize("option", [None, *OPTIONS, "compiled"])
def test_ddp_equals_joined_batch(option: str | None) -> None:
    model, reference = network(), network()
    with torch.no_grad():
        for p in model.parameters():  # of rank 0 in the end
            p.add_(hvd.rank())
    ddp = ddp_of(model, **({option: True} if option in OPTIONS else {}))
    if option == "compiled":  # torch's compiler refuses small buckets
        ddp = torch.compile(DistributedDataParallel(model), backend="eager")
    own = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_both(ddp, own, reference, plain, range(4), clip=0.5)


def test_no_sync_and_two_models() -> None:
    models, references = [network(), network()], [network(), network()]
    for model, reference in zip([ddp_of(m) for m in models], references, strict=True):
        with model.no_sync():
            loss_of(model, batch(hvd.rank(), 0)).backward()
        loss_of(model, batch(hvd.rank(), 1)).backward()
        for step in range(2):
            loss_of(reference, joined(step)).backward()
    for model, reference in zip(models, references, strict=True):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11)


class Branches(nn.Module):
    """Rank 0 leaves one branch out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.odd = network(), network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y if hvd.rank() == 0 else y + self.odd(x)


def test_unused_parameters() -> None:
    model = Branches()
    ddp = ddp_of(model, find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, batch(hvd.rank(), step)).backward()
    for p in model.parameters():
        alike = hvd.allgather(p.grad.unsqueeze(0))
        assert all(torch.equal(row, alike[0]) for row in alike)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.odd[0].weight.grad, torch.zeros_like(model.odd[0].weight))


@pytest.mark.parametrize("view", [False, True])
def test_sparse_embedding(view: bool) -> None:
    torch.manual_seed(7)
    model = nn.Embedding(6, 3, sparse=True)
    ddp = ddp_of(model, gradient_as_bucket_view=view)
    rows = [torch.tensor([0, r, r]) for r in range(hvd.size())]
    for step in range(2):
        ddp.zero_grad()
        (ddp(rows[hvd.rank()]) * (hvd.rank() + 1 + step)).sum().backward()
        want = torch.zeros(6, 3)
        for r, index in enumerate(rows):
            want.index_add_(0, index, torch.full((3, 3), (r + 1.0 + step) / hvd.size()))
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad.to_dense(), want)


@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook"])
def test_hooks(hook: str) -> None:
    model, reference = network().float(), network().float()
    ddp = ddp_of(model)
    ddp.register_comm_hook(None, getattr(default_hooks, hook))
    x, y = batch(hvd.rank(), 0)
    loss_of(ddp, (x.float(), y.float())).backward()
    x, y = joined(0)
    loss_of(reference, (x.float(), y.float())).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        tolerance = 1e-5 if hook == "allreduce_hook" else 3e-2
        torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)


def power_sgd(state: Any, bucket: Any) -> Any:
    """Rank 0 completes each bucket before the next one; the others start all buckets before."""
    if hvd.rank() == 0 and bucket.index() == 0:
        for source in range(1, hvd.size()):
            hvd.recv(torch.zeros(1), source)
    future: Any = powerSGD_hook.powerSGD_hook(state, bucket)
    if hvd.rank() == 0:
        future.wait()
    elif bucket.is_last():
        hvd.send(torch.zeros(1), 0)
    return future


def test_power_sgd_waits_in_its_callbacks() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    ddp = ddp_of(model)
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, lambda state, bucket: power_sgd(state, bucket))
    for step in range(4):
        ddp.zero_grad()
        torch.manual_seed(100 * step + hvd.rank())
        ddp(torch.randn(8, 64)).square().sum().backward()
    for p in model.parameters():
        rows = hvd.allgather(p.grad.unsqueeze(0))
        assert all(torch.equal(row, rows[0]) for row in rows)


def test_uneven_inputs() -> None:
    """C++ code of DDP gets the works of ranks that have joined."""
    model, reference = network(), network()
    model.register_buffer("shared", torch.zeros(1))
    ddp = ddp_of(model)
    own = torch.optim.SGD(ddp.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=False):
        train(ddp, own, range(2 + 2 * hvd.rank()))
    for step in range(2 * hvd.size()):
        plain.zero_grad()
        active = [batch(r, step) for r in range(hvd.size()) if step < 2 + 2 * r]
        torch.stack([loss_of(reference, data) for data in active]).mean().backward()
        plain.step()
    assert_same(model, reference)


def test_models_that_differ() -> None:
    """DDP compares with rank 0, which itself goes on and waits for the others."""
    dist.destroy_process_group()
    dist.init_process_group("farandole", timeout=timedelta(seconds=2))
    model = nn.Linear(5 + min(hvd.rank(), 1), 1)
    if hvd.rank() == 0:
        with pytest.raises(hvd.StallError, match="missing"):
            ddp_of(model)
    else:
        with pytest.raises(RuntimeError, match="appears not to match sizes"):
            ddp_of(model)


def test_a_rank_that_has_left_is_an_error_of_backward() -> None:
    ddp = ddp_of(network())
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    # From C++, without its class.
    with pytest.raises(RuntimeError, match=r"PeerError: ranks? [\d, ]*\b1\b"):
        loss_of(ddp, batch(hvd.rank(), 0)).backward()
    hvd.shutdown()
