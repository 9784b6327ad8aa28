# SPDX-License-Identifier: Apache-2.0
"""Gradients that the user has kept from `.grad`, and who else may look: threads, compilers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.toys import assert_same, batch, joined, loss_of, network, push, total, toys

pytestmark = pytest.mark.ranks(2, 3)
OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


@OPS
def test_a_kept_gradient_is_no_later_one(op: Any) -> None:
    (p, q), optimizer = toys(2, op=op)
    push(p, 1)
    push(q, 2)
    kept: Any = [p.grad, q.grad]
    p.grad = q.grad = None
    push(p, 3)
    push(q, 4)
    assert p.grad is not None
    p.grad = p.grad + kept[0]
    optimizer.step()
    assert p.grad.tolist() == [total(op, [1, 3])] * 4
    assert [g.tolist()[0] for g in kept] == [total(op, [1]), total(op, [2])]


@OPS
def test_a_kept_gradient_holds_what_was_reduced_before(op: Any) -> None:
    (p,), optimizer = toys(op=op)
    push(p, 1)
    optimizer.synchronize()
    push(p, 2)
    kept: Any = p.grad
    p.grad = None
    push(p, 3)
    optimizer.step()
    assert kept.tolist() == [total(op, [1, 2])] * 4


def test_a_kept_gradient_that_was_replaced() -> None:
    (p,), optimizer = toys()
    push(p)
    kept: Any = p.grad
    p.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"has been reset before it was reduced: use Distr"):
        kept.norm()
    with pytest.raises(RuntimeError, match="was replaced"):
        optimizer.step()


def test_a_kept_gradient_of_a_window_that_failed() -> None:
    (p,), optimizer = toys()
    push(p)
    kept: Any = p.grad
    if hvd.rank() == 0:
        optimizer.zero_grad()
    else:
        with pytest.raises(hvd.MismatchError):
            optimizer.step()
        push(p)
        with pytest.raises(RuntimeError, match="has been reset before it was reduced"):
            kept.norm()
    hvd.barrier()


def test_many_threads_look_at_gradients() -> None:
    model, reference = network(), network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def norm(p: nn.Parameter) -> Tensor:
        assert p.grad is not None
        return p.grad.norm()

    with ThreadPoolExecutor(8) as threads:
        for step in range(20):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, batch(hvd.rank(), step)).backward()
            loss_of(reference, joined(step)).backward()
            norms = threads.map(norm, list(model.parameters()) * 2)
            optimizer.step()
            plain.step()
            for own, p in zip(norms, list(reference.parameters()) * 2, strict=True):
                torch.testing.assert_close(own, norm(p))
    assert_same(model, reference)


def test_each_thread_trains_a_model_of_its_own() -> None:
    models = [network(), network()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05)) for model in models
    ]

    def train(number: int) -> None:
        for step in range(40):
            optimizers[number].zero_grad()
            loss_of(models[number], batch(hvd.rank(), step, number)).backward()
            optimizers[number].step()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))
    for number, model in enumerate(models):
        reference = network()
        plain = torch.optim.SGD(reference.parameters(), lr=0.05)
        for step in range(40):
            plain.zero_grad()
            loss_of(reference, joined(step, number)).backward()
            plain.step()
        assert_same(model, reference)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler on itself
def test_a_step_that_is_compiled() -> None:
    model, reference = network(), network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)

    @torch.compile(backend="eager")
    def train(data: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()

    step_only = torch.compile(optimizer.step, backend="eager")
    for step in range(4):
        train(batch(hvd.rank(), step))
        plain.zero_grad()
        loss_of(reference, joined(step)).backward()
        plain.step()
    for step in range(4, 7):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        step_only()
        plain.zero_grad()
        loss_of(reference, joined(step)).backward()
        plain.step()
    assert_same(model, reference)
