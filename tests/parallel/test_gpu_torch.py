# SPDX-License-Identifier: Apache-2.0
"""The torch tests once more, on tensors that farandole takes for tensors on GPUs (the double)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farandole.torch as hvd
from farandole import ops
from farandole.calls.requests import Call, Op
from farandole.torch.gradients.encoding import Encoding
from harness.borrowed import borrow, load
from harness.torch_on_double import gpu, pretend
from harness.toys import push, total, toys

pytestmark = pytest.mark.world("double")  # the GPU double stays in a process

pretend()

_OF_TORCH = (
    *("torch_adasum", "torch_amp", "torch_arrivals", "torch_changes", "torch_functions"),
    *("torch_gradients", "torch_ops", "torch_optimizer", "torch_sparse", "torch_sync_batch_norm"),
    *("torch_scenarios", "torch_wrapping"),
)
_LEFT_OUT = ("test_cost_of_hooks",)  # of the CPU's path


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    torch.set_num_threads(1)


globals().update(borrow(["prepared", *_OF_TORCH], "on_double", _LEFT_OUT, fixtures=["trained"]))
test_adasum_of_tensors = load("adasum", "on_double").test_torch


def test_tensors_are_reduced_by_the_double() -> None:
    """Else all of the above would be about the CPU."""
    x = torch.full((5,), 12.0 * (1 + hvd.rank()))
    gate = gpu().gate(gpu().stream)  # what makes x, as it were
    handle = hvd.allreduce_async_(x, postscale_factor=2.0)
    hvd.barrier()  # the host has long been able to
    assert x.tolist() == [12.0 * (1 + hvd.rank())] * 5
    gpu().open(gate)
    assert hvd.synchronize(handle) is x
    assert x.tolist() == [2 * total(hvd.Average, [0])] * 5


def test_calls_that_come_again_take_a_short_way_in_todays_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(x: torch.Tensor, in_place: bool) -> Any:
        call = hvd.allreduce_async_ if in_place else hvd.allreduce_async
        return call(x, op=hvd.Sum, name=f"again {in_place}")

    x, y = torch.ones(5), torch.ones(5)
    for _ in range(2):
        started(x, True).wait()
        started(y, False).wait()
    monkeypatch.setattr(ops, "submit", None)  # the long way
    for turn in range(3):
        monkeypatch.setattr(gpu(), "stream", gpu().new_stream())
        x.fill_(1.0 + turn + hvd.rank())
        y.fill_(2.0 + turn + hvd.rank())
        gate = gpu().gate(gpu().stream)
        handles = started(x, True), started(y, False)
        assert x.tolist() == [1.0 + turn + hvd.rank()] * 5
        gpu().open(gate)
        both = [handle.wait() for handle in handles]
        assert both[0] is x
        assert both[1] is not y
        for k, result in enumerate(both):
            assert result.tolist() == [sum(1.0 + k + turn + r for r in range(hvd.size()))] * 5


@pytest.mark.ranks(2, 3)
def test_bucket_views_change_nothing() -> None:
    """They are for gradients on the CPU."""
    (p,), optimizer = toys(gradient_as_bucket_view=True)
    for turn in range(2):
        optimizer.zero_grad(set_to_none=turn == 1)
        push(p, turn)
        own = p.grad
        optimizer.step()
        assert p.grad is own or turn == 0
        assert p.grad is not None
        assert p.grad.tolist() == [total(hvd.Average, [turn])] * 4


@pytest.mark.ranks(2, 3)
def test_a_captured_backward_pass_is_refused() -> None:
    """On all ranks; a replay would run no hook."""
    (p,), optimizer = toys()
    push(p)
    optimizer.zero_grad()
    gpu().capture(gpu().stream)
    try:
        with pytest.raises(ValueError, match="captured into a CUDA graph"):
            push(p, 1)
    finally:
        gpu().end_capture(gpu().stream)
    optimizer.zero_grad()
    push(p, 2)
    assert p.grad is not None
    assert p.grad.tolist() == [total(hvd.Average, [2])] * 4


def test_what_was_prepared_for_one_device_is_of_no_use_on_another() -> None:
    """As after `model.cuda()`, when the optimizer has been used before."""
    call = Call(Op.ALLREDUCE, reduce_op=hvd.Sum, name="moves")
    encoding = Encoding(call, hvd.Compression.none, False)
    here = torch.ones(5)
    assert encoding.encode(here) is here
    assert encoding.is_plain(torch.zeros(5))
    assert not encoding.is_plain(torch.zeros(5, device="meta"))
    with pytest.raises(TypeError, match="device meta"):
        encoding.encode(torch.zeros(5, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_moved_and_not_reduced(dtype: torch.dtype) -> None:
    every = [torch.full((3,), r + 1.0).to(dtype) for r in range(hvd.size())]
    mine = every[hvd.rank()]
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(TypeError, match=r"'small'.*float8.* is not reduced on GPUs; convert"):
            call(mine, op=hvd.Sum, name="small")
    gathered = hvd.allgather(mine, name="small")
    assert torch.equal(gathered.float(), torch.cat(every).float())
    assert (
        hvd.allreduce(mine.float(), op=hvd.Sum, name="small").tolist()
        == [sum(range(1, hvd.size() + 1))] * 3
    )
