# SPDX-License-Identifier: Apache-2.0
"""gradient_as_bucket_view on GPUs (the double): windows instead of memory that ranks map."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole as fd
import farandole.torch as hvd
from farandole._library import lib
from harness.borrowed import borrow
from harness.gpu_double import REAL_NCCL
from harness.ranks import restarted
from harness.torch_on_double import gpu, pretend
from harness.toys import assert_same, batch, grad_is, loss_of, network, push, push_each, total, toys

pytestmark = pytest.mark.world("double")  # the GPU double stays in a process

pretend()

VIEWS = {"gradient_as_bucket_view": True}
_OF_THE_CPU = ("test_they_are_not_staged",)

together = pytest.mark.ranks(2, 3, 4)  # one rank alone reduces nothing


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    torch.set_num_threads(1)


# Every test of the optimizer is among them.
globals().update(borrow(["torch_bucket_view"], "on_double", _OF_THE_CPU, ["in_buckets"]))


# ---- the windows


def places(optimizer: Any) -> list[Tensor]:
    return [g.encoding.view.tensor for g in optimizer._reducer.gradients]


@together
@pytest.mark.parametrize("set_to_none", [True, False])
def test_all_is_reduced_in_windows(set_to_none: bool) -> None:
    """Small and large, of two dtypes, that lie there or are brought."""
    sizes = [3, 1000, 700_000, 5]
    ps = [nn.Parameter(torch.zeros(n)) for n in sizes]
    ps += [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in sizes]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **VIEWS)
    for _ in range(3):
        before = gpu().placed_bytes()
        optimizer.zero_grad(set_to_none=set_to_none)
        for p in ps:
            push(p)
        optimizer.step()
        each = 4 if REAL_NCCL else 4 + 8  # symmetric kernels take no float64
        assert gpu().placed_bytes() - before >= sum(sizes) * each
        for p, place in zip(ps, places(optimizer), strict=True):
            assert p.grad is place
            assert (place == total(hvd.Average, [0])).all()


def train(model: nn.Module, steps: int, **options: Any) -> Iterator[list[Tensor]]:
    """The parameters after each step, of ranks that run out of data one after the other."""
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, batch(hvd.rank(), step)).backward()
        optimizer.step()
        yield [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("keeps", [True, False])
def test_ranks_that_have_joined(keeps: bool) -> None:
    """Gradients are reduced elsewhere then; who has joined keeps its own, or has no window left."""
    steps = 2 + hvd.rank()
    plain = list(train(network(), steps))
    assert hvd.join() == hvd.size() - 1
    model = network()
    run = train(model, steps, **VIEWS)
    for reference in plain:
        assert all(torch.equal(p, q) for p, q in zip(next(run), reference, strict=True))
    last = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if not keeps:
        run.close()
        model.zero_grad()
    assert hvd.join() == hvd.size() - 1
    if keeps:
        for p, grad in zip(model.parameters(), last, strict=True):
            assert torch.equal(p.grad, grad)


@pytest.mark.ranks(3, 4)
def test_process_sets_have_windows_of_their_own() -> None:
    """Ranks 2 and 3 open fewer than the others, and unequal sizes."""
    pair = fd.add_process_set([0, 1])
    (extra,), of_pair = toys(process_set=pair, **VIEWS)
    (p, q), of_all = toys(2, **VIEWS)
    for turn in range(3):
        before = gpu().placed_bytes()
        for optimizer in (of_pair, of_all):
            optimizer.zero_grad(set_to_none=turn == 1)
        push_each((extra, turn), (p, turn), (q, turn))
        of_pair.synchronize()
        of_all.synchronize()
        members = [0, 1] if hvd.rank() < 2 else [hvd.rank()]
        grad_is(extra, total(hvd.Sum, [turn], members) / len(members))
        grad_is(p, total(hvd.Average, [turn]))
        grad_is(q, total(hvd.Average, [turn]))
        assert gpu().placed_bytes() - before == (48 if hvd.rank() < 2 else 32)
    fd.remove_process_set(pair)


def test_own_calls_on_gradients_that_lie_there_on_some_ranks_only() -> None:
    ps = [nn.Parameter(torch.zeros(300_000)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **VIEWS)
    for p in ps:
        push(p)
    optimizer.step()
    for rank in range(hvd.size()):
        grad = ps[0].grad if hvd.rank() == rank else torch.zeros(300_000)
        assert grad is not None
        grad.fill_(7.0 + hvd.rank())
        hvd.allreduce_(grad, op=hvd.Sum, name="own")
        assert (grad == sum(7.0 + r for r in range(hvd.size()))).all()
        grad.fill_(float(hvd.rank()))
        hvd.broadcast_(grad, rank)
        assert (grad == rank).all()
    assert ps[1].grad is not None
    assert (ps[1].grad == total(hvd.Average, [0])).all()


@together
@restarted(FARANDOLE_GPU_BACKEND="host")
def test_without_nccl_they_are_copied_and_one_line_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    capfd.readouterr()
    model, reference = network(), network()
    for _ in range(2):  # optimizers
        *_, _ = train(model, 3, **VIEWS)
        *_, _ = train(reference, 3)
    assert_same(model, reference)
    assert capfd.readouterr().err.count("gradients on GPUs are copied") == 1


@together
def test_windows_go_with_their_last_gradient() -> None:
    def is_there(address: int) -> bool:
        return int(lib.farandole_device_of(address)) == gpu().device

    (p,), optimizer = toys(**VIEWS)
    (other,), another = toys(**VIEWS)
    for x in (p, other):
        push(x)
    optimizer.step()
    another.step()
    (place,) = (x.data_ptr() for x in places(optimizer))
    del optimizer
    gc.collect()
    assert is_there(place)
    grad_is(p, total(hvd.Average, [0]))
    p.grad = None
    for _ in range(200):  # the ranks agree between two of their calls that NCCL lets go of it
        push(other)
        another.step()
        if not hvd.allreduce(torch.tensor(is_there(place)), op=hvd.Max):
            return
    pytest.fail("the window is still there")


@together
def test_memory_that_is_short_is_named_in_bytes() -> None:
    ps = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(2)]
    hvd.allreduce(ps[0].detach())
    needs = b"cuMemCreate" if REAL_NCCL else b"ncclMemAlloc"
    gpu().lib.gpu_double_fail(needs, 0, 2)  # CUDA's number
    with pytest.raises(fd.LibraryError, match=r"ncclMemAlloc of 8\d{6} bytes"):
        hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **VIEWS)
    gpu().lib.gpu_double_heal()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **VIEWS)
    for p in ps:
        push(p)
    optimizer.step()
    assert all((p == -total(hvd.Average, [0])).all() for p in ps)
