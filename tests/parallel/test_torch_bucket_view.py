# SPDX-License-Identifier: Apache-2.0
"""gradient_as_bucket_view: every test of the optimizer once more, and what only such views do."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole as fd
import farandole.torch as hvd
from harness.borrowed import borrow, optimizers_with
from harness.toys import batch, grad_is, loss_of, network, push, total, toys

THE_OPTIMIZERS = (
    *("torch_amp", "torch_arrivals", "torch_changes", "torch_optimizer", "torch_sparse"),
)
# There the user's own tensor stays `.grad`, here it is replaced.
LEFT_OUT = ("test_set_to_none_false_keeps_the_tensor",)
in_buckets = optimizers_with("gradient_as_bucket_view")
globals().update(borrow(THE_OPTIMIZERS, "in_buckets", LEFT_OUT))


# ---- the memory

together = pytest.mark.ranks(2, 3, 4)  # one rank alone reduces nothing, and places nothing


def places(optimizer: Any) -> list[Tensor]:
    return [g.encoding.view.tensor for g in optimizer._reducer.gradients]


def large(count: int = 3) -> tuple[list[nn.Parameter], Any]:
    """Parameters of 1 MB each."""
    ps = [nn.Parameter(torch.zeros(250_000)) for _ in range(count)]
    return ps, hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=0.5))


def train_once(ps: list[nn.Parameter], optimizer: Any, set_to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    for p in ps:
        push(p)
    optimizer.step()


def mapped() -> int:
    return fd.metrics()["mapped_bytes"]


@together
def test_places_are_neighbours_in_reverse_order() -> None:
    ps, optimizer = large()
    starts = [x.data_ptr() for x in places(optimizer)]
    assert starts == sorted(starts, reverse=True)
    assert starts[0] - starts[-1] == 2 * 1_000_000 + 2 * (-1_000_000 % 64)
    assert [p.grad for p in ps] == [None] * 3


@together
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_stay_in_their_places(set_to_none: bool) -> None:
    ps, optimizer = large()
    for _ in range(4):
        train_once(ps, optimizer, set_to_none)
        for p, place in zip(ps, places(optimizer), strict=True):
            assert p.grad is place
            assert (place == total(hvd.Average, [0])).all()
    assert all((p == -2.0 * total(hvd.Average, [0])).all() for p in ps)


@together
@pytest.mark.parametrize("set_to_none", [True, False])
def test_they_are_not_staged(set_to_none: bool) -> None:
    ps, optimizer = large()
    train_once(ps, optimizer, set_to_none)
    for _ in range(3):
        before = mapped()
        train_once(ps, optimizer, set_to_none)
        if hvd.local_size() == hvd.size():
            # Of 3 MB in all; a new gradient is staged, and small blocks are.
            assert mapped() - before > (1_000_000 if set_to_none else 2_000_000)


@together
def test_they_survive_load_state_dict() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step() -> None:
        loss_of(model, batch(hvd.rank(), 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step()
    after = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), after, strict=True))
    loss_of(model, batch(hvd.rank(), 0)).backward()
    optimizer.synchronize()
    for p, place in zip(model.parameters(), places(optimizer), strict=True):
        assert p.grad is place


@together
def test_what_is_reduced_already_is_not_overwritten() -> None:
    """Accumulation onto a reduced gradient: the place holds it, so the new one lies elsewhere."""
    (p,), optimizer = toys()
    for ks in ([0], [0, 1], [0, 1, 2]):
        push(p, ks[-1])
        optimizer.synchronize()
        grad_is(p, total(hvd.Average, ks))
        assert p.grad is places(optimizer)[0]


@together
def test_a_foreign_gradient_is_replaced() -> None:
    (p,), optimizer = toys()
    push(p)
    optimizer.step()
    assert p.grad is not None
    p.grad.data = torch.zeros(4)  # as Module.to() does
    push(p, 1)
    grad_is(p, total(hvd.Average, [1]))
    optimizer.step()
    p.grad = torch.full((4,), 4.0 * hvd.rank())
    optimizer.step()
    grad_is(p, sum(4.0 * r for r in range(hvd.size())) / hvd.size())
    p.data = p.data.double()
    p.grad = None
    push(p)
    optimizer.synchronize()
    assert p.grad is not None
    assert p.grad.dtype is torch.float64
    assert (p.grad == total(hvd.Average, [0])).all()


@together
def test_new_parameters_have_places_too() -> None:
    _, optimizer = toys()
    added = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer.add_param_group({"params": added})
    for p in added:
        push(p)
    optimizer.step()
    assert [p.grad for p in added] == places(optimizer)[1:]


@together
def test_copies_and_pickles_are_ordinary_and_small() -> None:
    ps, optimizer = large()
    push(ps[0])
    optimizer.step()
    for x in (copy.deepcopy(ps[0].grad), pickle.loads(pickle.dumps(ps[0].grad))):
        assert x.untyped_storage().nbytes() == 1_000_000
        assert torch.equal(x, ps[0].grad)
        assert x.data_ptr() != places(optimizer)[0].data_ptr()


@together
def test_gradients_outlive_their_optimizer() -> None:
    ps, optimizer = large()
    for p in ps:
        push(p)
    optimizer.step()
    del optimizer
    gc.collect()
    other = hvd.empty(2_000_000).fill_(7.0)
    assert all((p.grad == total(hvd.Average, [0])).all() for p in ps)
    assert (other == 7.0).all()
