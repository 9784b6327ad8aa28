# SPDX-License-Identifier: Apache-2.0
"""Gradients that the user has kept from `.grad`, and who else may look: threads, compilers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.toys import assert_same, batch, joined, loss_of, pair, push, total, toys, train

pytestmark = pytest.mark.ranks(2, 3)
COMPILED = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler on itself
OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


@OPS
@pytest.mark.parametrize("views", [False, True])
def test_a_kept_gradient_stays_what_it_was(op: Any, views: bool) -> None:
    """But for a view, which is written again with the next step."""
    (p,), optimizer = toys(op=op, gradient_as_bucket_view=views)
    kept: list[Any] = []
    for k in range(3):
        push(p, k)
        kept.append(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    expected = [2, 2, 2] if views else [0, 1, 2]
    assert [g.tolist()[0] for g in kept] == [total(op, [k]) for k in expected]


def test_many_threads_look_at_gradients() -> None:
    model, optimizer, reference, plain = pair()

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
    pairs = [pair() for _ in range(2)]

    def run(number: int) -> None:
        train(*pairs[number][:2], range(40), part=number)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    for number, (model, _, reference, plain) in enumerate(pairs):
        train(reference, plain, range(40), alone=True, part=number)
        assert_same(model, reference)


@COMPILED
def test_compiled_autograd() -> None:
    """It drops what should run at the end of a pass, so only step() can reduce."""
    compiled: Any = torch._dynamo.compiled_autograd
    (p,), optimizer = toys()
    with compiled._enable(torch.compile(backend="eager")):
        with pytest.raises(ValueError, match="compiled autograd does not report the end"):
            push(p)
        optimizer.zero_grad()
        with optimizer.no_sync():
            push(p, 1)
    optimizer.step()
    assert p.tolist() == [-total(hvd.Average, [1])] * 4


@COMPILED
def test_a_step_that_is_compiled() -> None:
    model, optimizer, reference, plain = pair()

    @torch.compile(backend="eager")
    def one_step(data: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()

    step_only = torch.compile(optimizer.step, backend="eager")
    for step in range(4):
        one_step(batch(hvd.rank(), step))
    for step in range(4, 7):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        step_only()
    train(reference, plain, range(7), alone=True)
    assert_same(model, reference)
