# SPDX-License-Identifier: Apache-2.0
"""Compressors with error feedback: resumed runs, what is refused, and compressors of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.feedback import KINDS, MODELS, SHAPE, gradient, push, push_each, sgd, weight

several = pytest.mark.ranks(2, 3, 4)
each = pytest.mark.parametrize("kind", KINDS)


# ---- resume


@several
@each
def test_a_resumed_run_has_the_same_bits(kind: str) -> None:
    def run(p: nn.Parameter, optimizer: Any, steps: range) -> None:
        for step in steps:
            push(p, gradient(hvd.rank(), step, torch.float32))
            optimizer.step()
            optimizer.zero_grad()

    p = weight(torch.float32)
    optimizer = sgd(p, kind=kind)
    run(p, optimizer, range(3))
    saved = p.detach().clone(), optimizer.compression_state_dict()
    run(p, optimizer, range(3, 6))
    again = nn.Parameter(saved[0])
    resumed = sgd(again, kind=kind)
    resumed.load_compression_state_dict(saved[1])
    run(again, resumed, range(3, 6))
    assert torch.equal(again, p)
    without = nn.Parameter(saved[0].clone())
    run(without, sgd(without, kind=kind), range(3, 6))
    assert not torch.equal(without, p)


@several
def test_a_wrong_state_changes_nothing() -> None:
    p = weight()
    optimizer = sgd(p)
    push(p, gradient(hvd.rank(), 0))
    optimizer.step()
    before = optimizer.compression_state_dict()
    with pytest.raises(ValueError, match="other"):
        optimizer.load_compression_state_dict({"other": {}})
    with pytest.raises(ValueError, match=r"p0 has shape \[3\]"):
        optimizer.load_compression_state_dict({"p0": {"residual": torch.zeros(3)}})
    after = optimizer.compression_state_dict()
    assert torch.equal(before["p0"]["residual"], after["p0"]["residual"])
    optimizer.load_compression_state_dict({})
    assert optimizer.compression_state_dict() == {"p0": {}}


# ---- what is refused


@each
def test_what_does_not_go_together(kind: str) -> None:
    p = weight()
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match="Average and Sum"):
            sgd(p, kind=kind, op=op)
    with pytest.raises(ValueError, match="gradient_as_bucket_view"):
        sgd(p, kind=kind, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="groups"):
        sgd(p, kind=kind, groups=1)
    with pytest.raises(TypeError, match=r"p0 is torch\.complex64"):
        sgd(nn.Parameter(torch.zeros(SHAPE, dtype=torch.complex64)), kind=kind)
    with pytest.raises(TypeError, match=r"pass an object, as \w+\(\)"):
        sgd(p, compression=type(KINDS[kind]()))
    with pytest.raises(TypeError, match=r"compression gives .* for parameter p0"):
        sgd(p, compression=lambda name, parameter: type(KINDS[kind]()))
    with pytest.raises(TypeError, match="error feedback"):
        hvd.allreduce(torch.ones(3), name="no", compression=KINDS[kind]())


def test_wrong_settings() -> None:
    for ratio in (0, -1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="ratio"):
            hvd.Compression.topk(ratio)  # type: ignore[arg-type]
    for number in (0, -3, 1.5, True):
        with pytest.raises(ValueError, match="at least 1"):
            hvd.Compression.powersgd(number)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 1"):
            hvd.Compression.int8(number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 8"):
        hvd.Compression.onebit(12)


@several
def test_a_sparse_gradient_is_refused_on_all_ranks() -> None:
    table = nn.Embedding(500, 20, sparse=True)
    optimizer = sgd(table.weight)
    loss = table(torch.tensor([hvd.rank()])).sum()
    with pytest.raises(ValueError, match="dense floating-point"):
        loss.backward()
    optimizer.zero_grad()
    hvd.allreduce(torch.ones(1), name="after")


# ---- a compressor that a user writes


class Signs(hvd.FeedbackCompressor):
    """Three calls: the largest of the scales by a gather, the signs, and a useless last one."""

    smallest = 10

    def __init__(self, fails: int = 99) -> None:
        self.fails = fails

    def reduce(self, tensor: Tensor, state: dict[str, Tensor], ranks: int, rank: int) -> Any:
        scales = yield self.allgather(tensor.abs().mean().reshape(1))
        scale = scales.max()
        signs = tensor.sign()
        if self.fails == 1 and rank == ranks - 1:
            raise KeyError("no signs")
        total = yield self.allreduce(signs)
        if self.fails == 2 and rank == 0:
            raise ArithmeticError("no mean")
        yield self.alltoall(torch.ones(ranks, 1))
        return total * scale, signs * scale


@several
def test_a_users_compressor() -> None:
    p = weight()
    optimizer = sgd(p, compression=Signs(), op=hvd.Sum)
    lost = [torch.zeros(SHAPE, dtype=torch.float64) for _ in range(hvd.size())]
    for step in range(4):
        optimizer.zero_grad()
        push(p, gradient(hvd.rank(), step))
        optimizer.step()
        own = [gradient(r, step) + lost[r] for r in range(hvd.size())]
        scale = max(x.abs().mean() for x in own)
        lost = [x - x.sign() * scale for x in own]
        assert p.grad is not None
        torch.testing.assert_close(p.grad, sum(x.sign() for x in own) * scale)


@several
@pytest.mark.parametrize("fails", [1, 2])
def test_a_compressor_that_raises_on_one_rank_ends_the_step_on_all(fails: int) -> None:
    p, q = weight(), weight()
    optimizer = sgd(p, q, compression=Signs(fails))
    for step in range(2):
        with pytest.raises((RuntimeError, ValueError), match=r"no signs|no mean"):
            push_each((p, gradient(hvd.rank(), step)), (q, gradient(hvd.rank(), step)))
        optimizer.zero_grad()
    hvd.allreduce(torch.ones(1), name="after")


class NoZeros(hvd.FeedbackCompressor):
    def reduce(self, tensor: Tensor, state: dict[str, Tensor], ranks: int, rank: int) -> Any:
        if not tensor.any():
            raise ArithmeticError("no zeros")
        total = yield self.allreduce(tensor)
        return total, tensor


@several
def test_one_that_raises_where_a_gradient_is_missing() -> None:
    p, q = weight(), weight()
    optimizer = sgd(p, q, compression=NoZeros())
    for step in range(2):
        pairs = [(p, gradient(hvd.rank(), step)), (q, gradient(hvd.rank(), step))]
        with pytest.raises((RuntimeError, ValueError), match="no zeros"):
            push_each(*pairs[: 1 if hvd.rank() == 1 else 2])
        optimizer.zero_grad()
    hvd.allreduce(torch.ones(1), name="after")


@several
def test_after_a_timeout_the_step_goes_on() -> None:
    p = weight()
    optimizer = sgd(p, kind="int8", op=hvd.Sum)
    model = MODELS["int8"](hvd.size())
    with optimizer.no_sync():
        push(p, gradient(hvd.rank(), 0))
    if hvd.rank() == 0:
        with pytest.raises(hvd.StallError):
            optimizer.step(timeout=0.05)
        hvd.send(torch.ones(1), destination=1)
    elif hvd.rank() == 1:
        hvd.recv(torch.ones(1), source=0)
    optimizer.step()
    expected = model.step([gradient(r, 0).numpy() for r in range(hvd.size())])
    np.testing.assert_allclose(-p.detach().numpy(), expected, atol=1e-9)
