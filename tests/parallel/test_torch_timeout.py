# SPDX-License-Identifier: Apache-2.0
"""step(timeout=) and synchronize(timeout=): an error that names gradients, and then it goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.errors import StallError
from harness.toys import assert_same, batch, loss_of, network, train

CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": hvd.allreduce,
    "allgather": hvd.allgather,
    "broadcast": partial(hvd.broadcast, root_rank=0),
    "reducescatter": hvd.reducescatter,
    "alltoall": hvd.alltoall,
    "scatter": partial(hvd.scatter, root_rank=0),
    "allgather_object": hvd.allgather_object,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_waits_takes_a_timeout(call: str) -> None:
    """The call stays under way: the rank that comes late completes it."""
    run = partial(CALLS[call], torch.full((2, 3), 1.0 + hvd.rank()), name=f"late {call}")
    if hvd.rank() == 0:
        with pytest.raises(StallError, match=f"late {call}"):
            run(timeout=0.05)
        hvd.send(torch.ones(1), 1)
    else:
        hvd.recv(torch.empty(1), 0)
        run()
    meet("go on")


def meet(name: str) -> None:
    hvd.allreduce(torch.ones(1), name=name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("call", ["step", "synchronize"])
def test_a_rank_that_comes_late(call: str, bucket_view: bool) -> None:
    model, reference = network(), network()
    last = hvd.size() - 1
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        gradient_as_bucket_view=bucket_view,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        if hvd.rank() == last:
            meet("late")  # when the others have lost patience, twice
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, batch(hvd.rank(), step)).backward()
        if hvd.rank() != last:
            before = [p.detach().clone() for p in model.parameters()]
            wait: Callable[..., Any] = getattr(optimizer, call)
            for _ in range(2):
                with pytest.raises(StallError) as caught:
                    wait(timeout=0.05)
                text = str(caught.value)
                assert caught.value.under_way
                assert "gradients of " in text
                assert "0.weight" in text
                assert "not done within the timeout of 0.05 s" in text
                assert re.search(rf"ranks? [\d, -]*{last} missing", text)
            for p, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(p, old)
            meet("late")
        getattr(optimizer, call)(timeout=60.0)
        if call == "synchronize":
            optimizer.step()
        train(reference, plain, range(step, step + 1), alone=True)
        assert_same(model, reference)


def stalled(optimizer: Any) -> str:
    with pytest.raises(StallError) as caught:
        optimizer.step(timeout=0.05)
    return str(caught.value)


@pytest.mark.ranks(2, 3)
def test_only_the_step_is_missing() -> None:
    p = nn.Parameter(torch.zeros(3000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    with optimizer.no_sync():
        (p * (hvd.rank() + 1.0)).sum().backward()
    if hvd.rank() == 0:
        assert "gradients of group[0][0]: not done within the timeout of 0.05 s" in stalled(
            optimizer
        )
    meet("step")
    optimizer.step()
    assert p.tolist() == [-hvd.size() * (hvd.size() + 1) / 2] * 3000


def test_where_it_does_not_go() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))

    def closure() -> Any:
        raise AssertionError("called")

    with pytest.raises(ValueError, match="not work with a closure"):
        optimizer.step(closure, timeout=1.0)
    if hvd.size() > 1:
        q = nn.Parameter(torch.ones(3))
        adasum = hvd.DistributedOptimizer(torch.optim.SGD([q], lr=1.0), op=hvd.Adasum)
        with pytest.raises(NotImplementedError, match="Adasum takes no timeout"):
            adasum.step(timeout=1.0)
