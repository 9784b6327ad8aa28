# SPDX-License-Identifier: Apache-2.0
"""Gradients that are reset, parameters that come and go, several optimizers."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from harness.c10d import since
from harness.toys import grad_is, push, push_each, total, toys, value

# ---- resets and edits


def test_gradients_may_be_changed_by_any_means() -> None:
    (p, q), optimizer = toys(2)
    whole = total(hvd.Average, [0])
    edits: list[Any] = [
        lambda: p.grad.mul_(2),
        lambda: setattr(p, "grad", p.grad * 2),
        lambda: p.grad.data.clamp_(max=1),
        lambda: setattr(p, "grad", torch.ones(4)),
        lambda: setattr(p, "grad", None),
    ]
    for edit, expected in zip(edits, [2 * whole, 2 * whole, 1.0, 1.0, None], strict=True):
        push_each((p, 0), (q, 0))
        edit()
        optimizer.step()
        grad_is(p, expected)
        grad_is(q, whole)
        optimizer.zero_grad()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("equally_many", [False, True])
def test_freezing_on_one_rank_is_an_error_on_all(equally_many: bool) -> None:
    (p, q), optimizer = toys(2)
    frozen = {1: q, **({0: p} if equally_many else {})}.get(hvd.rank())
    if frozen is not None:
        frozen.requires_grad_(False)
    own = "those of all its 2" if frozen is None else "those of 1 of its 2, without group"
    with pytest.raises(hvd.MismatchError, match=f"different parameters; this rank has sent {own}"):
        push(q if frozen is p else p)
    assert float(hvd.allreduce(torch.ones(()), op=hvd.Sum)) == hvd.size()
    p.requires_grad_(True)
    q.requires_grad_(True)
    for k in range(2):
        optimizer.zero_grad()
        push(p, k)
        push(q, k + 1)
        optimizer.step()
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k + 1]))


@pytest.mark.ranks(2, 3, 4)
def test_different_shapes_are_an_error_on_all() -> None:
    p = nn.Parameter(torch.zeros(3 + hvd.rank() % 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("layer.weight", p)])
    with pytest.raises(hvd.MismatchError, match=r"layer\.weight"):
        p.sum().backward()
    optimizer.zero_grad()
    assert float(hvd.allreduce(torch.ones(()), op=hvd.Sum)) == hvd.size()


# ---- parameters come and go


def test_another_dtype_between_backward_and_step() -> None:
    (p, q), optimizer = toys(2)
    for k, dtype in enumerate((torch.float64, torch.float16, torch.float32)):
        optimizer.zero_grad()
        with optimizer.no_sync():
            push_each((p, k), (q, k + 1))
        nn.ParameterList([p, q]).to(dtype)
        optimizer.step()
        assert p.grad is not None
        assert p.grad.dtype is dtype
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k + 1]))


@pytest.mark.ranks(2, 3, 4)  # alone, nobody reduces: torch's own optimizer says it
def test_another_shape_between_backward_and_step() -> None:
    (p, q), optimizer = toys(2)
    with optimizer.no_sync():
        push_each((p, 0), (q, 1))
    p.data = torch.zeros(6)
    with pytest.raises(RuntimeError, match=r"and shape \[4\], but .* and shape \[6\]: change"):
        optimizer.step()
    grad_is(q, total(hvd.Average, [1]))
    optimizer.zero_grad()
    push(p, 1)
    assert p.grad is not None
    assert p.grad.tolist() == [total(hvd.Average, [1])] * 6


def test_another_dtype_while_unused_and_back() -> None:
    (p, q), optimizer = toys(2)
    for k, dtype in enumerate((torch.float32, torch.float64, torch.float32, torch.float32)):
        p.data = p.data.to(dtype)
        everywhere = dtype is torch.float32
        used = everywhere or hvd.rank() == 0
        push_each((q, k), *([(p, k + 1)] if used else []))
        alone = value(0, k + 1) / hvd.size()
        grad_is(p, total(hvd.Average, [k + 1]) if everywhere else alone)
        optimizer.step()
        optimizer.zero_grad()


@since(2, 3)
@pytest.mark.ranks(2, 3, 4)  # alone, there are no hooks
@pytest.mark.parametrize("views", [True, False])
def test_torch_does_not_swap_tensors_that_have_hooks(views: bool) -> None:
    """A tensor without hooks would be reduced in step() only, after clip_grad_norm_()."""
    (p, q), optimizer = toys(2, gradient_as_bucket_view=views)
    parts = nn.ParameterList([p, q])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for convert in (parts.double, lambda: parts.load_state_dict(parts.state_dict())):
            with pytest.raises(RuntimeError, match=r"Couldn't swap|Cannot swap"):
                convert()
        push_each((p, 0), (q, 1))
        grad_is(p, total(hvd.Average, [0]))
        grad_is(q, total(hvd.Average, [1]))
        optimizer.step()
        del optimizer
        gc.collect()
        parts.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
    optimizer.zero_grad()
    push_each((p, 2), (q, 3))
    grad_is(p, total(hvd.Average, [2]))
    grad_is(q, total(hvd.Average, [3]))


def test_a_new_optimizer_takes_over() -> None:
    (p,), old = toys()
    push(p)
    old.step()
    new = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    new.zero_grad()
    push(p)
    new.step()
    grad_is(p, total(hvd.Sum, [0]))
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="newer DistributedOptimizer"):
            old.step()
    del old
    gc.collect()
    new.zero_grad()
    push(p, 1)
    new.step()
    grad_is(p, total(hvd.Sum, [1]))


@pytest.mark.parametrize("taken", [False, True])
def test_a_parameter_that_leaves(taken: bool) -> None:
    """Another optimizer may take it at once. Else the next step() forgets it."""
    (p, q), optimizer = toys(2)
    push_each((p, 0), (q, 0))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = [p]
    (_,), taker = toys(op=hvd.Sum)
    if taken:
        taker.add_param_group({"params": [q]})
    optimizer.step()
    q.grad = None
    push_each((p, 1), (q, 2))
    grad_is(p, total(hvd.Average, [1]))
    grad_is(q, total(hvd.Sum, [2]) if taken else value(hvd.rank(), 2))
    taker.step()
    optimizer.step()
    kept = weakref.ref(q)
    del q, taker
    gc.collect()
    assert kept() is None


def test_hooks_end_with_the_optimizer() -> None:
    (p,), optimizer = toys()
    push(p)
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    push(p)
    grad_is(p, value(hvd.rank()))  # local
    pickle.dumps(p)


# ---- several optimizers


def test_two_optimizers_step_in_different_orders() -> None:
    (p,), first = toys()
    (q, unused), second = toys(2, op=hvd.Sum)
    for k in range(4):
        for optimizer in (first, second):
            optimizer.zero_grad()
        pairs = [(q, k + 1), (p, k)][:: 1 if hvd.rank() % 2 else -1]
        push_each(*pairs, *([(unused, 0)] if hvd.rank() == 0 else []))
        order = [first, second] if hvd.rank() % 2 else [second, first]
        for optimizer in order:
            optimizer.step()
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Sum, [k + 1]))
        grad_is(unused, total(hvd.Sum, [0], [0]))


def test_shared_loss_between_steps() -> None:
    (p,), first = toys()
    (q,), second = toys()
    for k in range(3):
        first.zero_grad()
        second.zero_grad()
        (p * value(hvd.rank(), k) + q * value(hvd.rank(), k)).sum().backward()
        first.step()
        push(q, k + 1)  # accumulates onto what is under way, or done
        second.step()
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k, k + 1]))


def test_process_sets() -> None:
    ranks = [r for r in range(hvd.size()) if r % 2 == 0]
    evens = hvd.add_process_set(ranks) if len(ranks) < hvd.size() else hvd.global_process_set
    (p,), optimizer = toys(process_set=evens)
    push(p)
    optimizer.step()
    if hvd.rank() in ranks:
        grad_is(p, sum(value(r) for r in ranks) / len(ranks))
    else:
        grad_is(p, value(hvd.rank()))
    if evens is not hvd.global_process_set:
        hvd.remove_process_set(evens)
