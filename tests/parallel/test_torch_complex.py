# SPDX-License-Identifier: Apache-2.0
"""Complex tensors, and those whose memory holds other values than they.

Torch conjugates and negates lazily, with a bit that only torch reads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole as fd
import farandole.torch as hvd
from farandole.torch.kind import is_lazy

pytestmark = pytest.mark.ranks(2, 4)

TURNS = 3  # the second and later ones take the short way


def values(rank: int, dtype: torch.dtype = torch.complex64, turn: int = 0) -> Tensor:
    """Rows for all ranks."""
    n = hvd.size()
    real = torch.arange(2.0 * n).view(n, 2) + rank + 10 * turn
    return torch.complex(real, 3 * real - 1 - rank).to(dtype)


def negated(x: Tensor) -> Tensor:
    """A float tensor with the negative bit."""
    return torch._neg_view(x.real.contiguous())


# What makes a lazy tensor of values(), each time from new memory.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "conjugated": lambda x: x.conj(),
    "conjugated and turned": lambda x: x.t().contiguous().t().conj(),
    "every second, conjugated": lambda x: torch.stack([x, -x], 1)[:, 0].conj(),
    "negated": negated,
    "imaginary part of what is conjugated": lambda x: x.conj().imag,
}
# Call -> what it gives on this rank, from all ranks' tensors.
CALLS: dict[str, tuple[Callable[[Tensor], Any], Callable[[list[Tensor]], Tensor]]] = {
    "allreduce": (
        lambda x: hvd.allreduce(x, name="complex", op=hvd.Sum),
        lambda xs: sum(xs[1:], xs[0]),
    ),
    "average": (lambda x: hvd.allreduce(x), lambda xs: sum(xs[1:], xs[0]) / hvd.size()),
    "allreduce_async": (
        lambda x: hvd.allreduce_async(x, name="complex", op=hvd.Sum).wait(),
        lambda xs: sum(xs[1:], xs[0]),
    ),
    "grouped": (
        lambda x: hvd.grouped_allreduce([torch.ones(2), x], op=hvd.Sum)[1],
        lambda xs: sum(xs[1:], xs[0]),
    ),
    "broadcast": (lambda x: hvd.broadcast(x, hvd.size() - 1, name="complex"), lambda xs: xs[-1]),
    "allgather": (lambda x: hvd.allgather(x, name="complex"), torch.cat),
    "reducescatter": (
        lambda x: hvd.reducescatter(x, name="complex", op=hvd.Sum),
        lambda xs: sum(xs[1:], xs[0])[hvd.rank() :][:1],
    ),
    "alltoall": (
        lambda x: hvd.alltoall(x, name="complex"),
        lambda xs: torch.cat([x[hvd.rank() :][:1] for x in xs]),
    ),
    "neutral": (
        lambda x: fd.allreduce(x, op=fd.Sum, name="complex"),
        lambda xs: sum(xs[1:], xs[0]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_out_of_place(call: str, form: str) -> None:
    run, expected = CALLS[call]
    dtypes, whose = (torch.complex64, torch.complex128), ("all", "last rank")
    for dtype, who, turn in product(dtypes, whose, range(TURNS)):
        made = [FORMS[form](values(rank, dtype, turn)) for rank in range(hvd.size())]
        plain = [x.resolve_conj().resolve_neg().clone() for x in made]
        own = who == "all" or hvd.rank() == hvd.size() - 1
        x = made[hvd.rank()] if own else plain[hvd.rank()]
        result = run(x)
        assert not is_lazy(result)
        torch.testing.assert_close(result, expected(plain))
        assert torch.equal(x, plain[hvd.rank()])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["allreduce_", "grouped_allreduce_", "broadcast_", "neutral"])
def test_in_place(call: str, form: str) -> None:
    """Refused with the words for it, on all ranks; the lazy tensor comes where a plain one was."""
    run: dict[str, Callable[[Tensor], Any]] = {
        "allreduce_": lambda x: hvd.allreduce_(x, name="complex in place"),
        "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([x], name="complex in place"),
        "broadcast_": lambda x: hvd.broadcast_(x, 0, name="complex in place"),
        "neutral": lambda x: fd.allreduce_(x, name="complex in place"),
    }
    lazy = [FORMS[form](values(rank)) for rank in range(hvd.size())]

    def plain() -> Tensor:
        resolved = lazy[hvd.rank()].resolve_conj().resolve_neg()
        return resolved.clone(memory_format=torch.contiguous_format)

    for _ in range(2):
        run[call](plain())
    if form == "plain":
        return
    text = "negated" if lazy[0].is_neg() else "conjugated"
    if hvd.rank() == 0:
        before = lazy[0].clone()
        with pytest.raises(ValueError, match=f"lazily {text}.*resolve_conj"):
            run[call](lazy[0])
        assert torch.equal(lazy[0], before)
    else:
        with pytest.raises(ValueError, match=f"rank 0 refused.*lazily {text}"):
            run[call](plain())
    run[call](plain())


@pytest.mark.parametrize("call", ["allreduce", "allgather", "broadcast", "alltoall", "average"])
def test_derivatives(call: str) -> None:
    """Backward passes get lazy gradients too; the same as of a gradient that is resolved."""
    run, _ = CALLS[call]
    weight = values(hvd.rank(), turn=1)
    grads = []
    for resolve in (False, True):
        z = values(hvd.rank()).requires_grad_()
        y = run(z.conj() * weight)
        (y.conj().resolve_conj() if resolve else y.conj()).imag.pow(2).sum().backward()
        grads.append(z.grad)
    torch.testing.assert_close(*grads)


def test_broadcast_parameters_through_views() -> None:
    states = [
        {name: make(values(rank)) for name, make in FORMS.items()} for rank in (0, hvd.rank())
    ]
    expected = {name: x.resolve_conj().resolve_neg().clone() for name, x in states[0].items()}
    hvd.broadcast_parameters(states[1], root_rank=0)
    for name, x in states[1].items():
        assert torch.equal(x, expected[name])


# ---- gradients


def lazy_loss(p: Tensor, weight: Tensor) -> Tensor:
    """Its gradient is conjugated lazily where p is complex."""
    return (p.conj() * weight).sum().abs().square()


GRADIENTS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "in buckets": {"gradient_as_bucket_view": True},
    "compressed": {"compression": hvd.Compression.bf16},
    "Sum": {"op": hvd.Sum},
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("options", GRADIENTS)
@pytest.mark.parametrize("who", ["all", "last rank"])
def test_gradients(options: str, dtype: torch.dtype, who: str) -> None:
    """`who` has lazy ones; the others have the same, resolved."""
    n = hvd.size()
    begin = torch.tensor([1 + 2j, 3 - 1j, 0.5j], dtype=dtype)
    p = nn.Parameter(begin.clone())
    given = GRADIENTS[options]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), **given)
    resolved = who == "last rank" and hvd.rank() < n - 1
    if resolved:
        p.register_hook(lambda g: g.resolve_conj())
    for turn in range(TURNS):
        expected = torch.zeros_like(begin)
        for rank in range(n):
            q = begin.clone().requires_grad_()
            lazy_loss(q, values(rank, dtype, turn).flatten()[:3]).backward()
            assert q.grad.is_conj()
            expected += q.grad
        lazy_loss(p, values(hvd.rank(), dtype, turn).flatten()[:3]).backward()
        optimizer.synchronize()
        torch.testing.assert_close(p.grad, expected if options == "Sum" else expected / n)
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_that_the_user_sets_and_accumulates() -> None:
    """Lazy `.grad` from elsewhere, two passes for a step, and one more pass after a reduction."""
    n = hvd.size()
    p = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=0.0), backward_passes_per_step=2, op=hvd.Sum
    )

    def mine(rank: int) -> Tensor:
        return values(rank).flatten()[:3].conj()

    for _ in range(2):
        p.grad = mine(hvd.rank())
        optimizer.synchronize()
        torch.testing.assert_close(p.grad, sum((mine(r) for r in range(1, n)), mine(0)))
        optimizer.step()
        optimizer.zero_grad()
    weights = [values(rank).flatten()[:3] for rank in range(n)]
    for _ in range(2):
        for _ in range(2):
            (p @ weights[hvd.rank()]).real.backward()
        optimizer.synchronize()
        total = sum(weights[1:], weights[0]).conj()
        torch.testing.assert_close(p.grad, 2 * total)
        optimizer.step()
        optimizer.zero_grad()
