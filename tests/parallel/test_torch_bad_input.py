# SPDX-License-Identifier: Apache-2.0
"""Gradients and passes that a program gets wrong, on one rank or on all: the result is right, or
every rank gets a typed error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import farandole.torch as hvd
from harness.in_flight import late
from harness.toys import grad_is, push_each, total, toys, value

pytestmark = pytest.mark.ranks(2, 3)

TYPED = hvd.HorovodInternalError, ValueError, TypeError, RuntimeError
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS)


def failed(act: Callable[[], object]) -> bool:
    """True if it raises a typed error; it does so on all ranks or on none."""
    own = None
    try:
        act()
    except TYPED as error:
        own = f"{type(error).__name__}: {error}"
    errors = MPI.COMM_WORLD.allgather(own)
    assert len({found is None for found in errors}) == 1, errors
    return own is not None


def restart() -> None:
    """Whoever is still in the job leaves it, and all meet again."""
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    hvd.init()
    trains(*toys(2))


def trains(ps: list[nn.Parameter], optimizer: Any) -> None:
    """The job goes on."""
    optimizer.zero_grad()
    push_each(*((p, k) for k, p in enumerate(ps)))
    for k, p in enumerate(ps):
        assert p.grad is not None
        assert p.grad.to_dense().flatten().tolist() == [total(hvd.Average, [k])] * p.numel()
    optimizer.step()


# ---- `.grad` of another form


class Own(Tensor):
    """A user's class of tensors."""


def freed(g: Tensor) -> Tensor:
    g.untyped_storage().resize_(0)
    return g


def inferred(g: Tensor) -> Tensor:
    with torch.inference_mode():
        return g.clone()


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:, :1].expand(2, 3),
    "a part of a buffer": lambda g: torch.cat([g, g, g])[2:4],
    "with gaps": lambda g: torch.stack([g, -g], 2)[:, :, 0],
    "that requires a gradient": lambda g: g.requires_grad_(),
    "with a graph": lambda g: g.requires_grad_() * 3,
    "sparse": Tensor.to_sparse,
    "of a subclass": lambda g: g.as_subclass(Own),
    "of inference mode": inferred,
    "negated lazily": torch._neg_view,
}
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": Tensor.flatten,
    "turned": lambda g: g.t().contiguous(),
    "longer": lambda g: torch.cat([g, g]),
    "empty": lambda g: g[:0],
    "double": Tensor.double,
    "half": Tensor.half,
    "integers": Tensor.long,
    "complex": lambda g: torch.complex(g, g),
    "freed": freed,
}


def spoil(p: Tensor, form: str) -> None:
    """Gives p a gradient of this form, with this rank's values."""
    g = torch.arange(6.0).reshape(2, 3) * 8 + value(hvd.rank())
    p.grad = RIGHT[form](g) if form in RIGHT else g
    if form in DATA:
        p.grad.data = DATA[form](g.clone())


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("form", [*RIGHT, *DATA])
def test_a_gradient_of_another_form(form: str, everywhere: bool, options: str) -> None:
    p, q = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(5))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), **OPTIONS[options])
    for _ in range(2):
        with optimizer.no_sync():
            push_each((p, 0), (q, 1))
        if everywhere or late():
            spoil(p, form)
        own = None if form == "freed" else p.grad.detach().to_dense().clone()  # type: ignore[union-attr]
        everyones = MPI.COMM_WORLD.allgather(own)
        if not failed(optimizer.synchronize):
            assert form != "freed"
            mean = torch.stack([x.reshape(2, 3).double() for x in everyones]).mean(0)
            torch.testing.assert_close(p.grad.to_dense().double(), mean)  # type: ignore[union-attr]
            assert p.grad.dtype is torch.float32  # type: ignore[union-attr]
        else:
            assert form in DATA
        trains([p, q], optimizer)


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
def test_one_gradient_of_two_parameters(everywhere: bool, options: str) -> None:
    (p, q), optimizer = toys(2, **OPTIONS[options])
    with optimizer.no_sync():
        push_each((p, 0), (q, 0))
    if everywhere or late():
        q.grad = p.grad
    if not failed(optimizer.synchronize):
        grad_is(p, total(hvd.Average, [0]))
        grad_is(q, total(hvd.Average, [0]))
    trains([p, q], optimizer)


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("edit", ["another tensor", "doubled", "none", "sparse"])
def test_a_hook_that_changes_grad(edit: str, everywhere: bool, options: str) -> None:
    """One that runs before ours, so its gradient is the one that is sent."""
    p, q = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    edits: dict[str, Callable[[Any], object]] = {
        "another tensor": lambda x: setattr(x, "grad", torch.full((4,), value(hvd.rank(), 2))),
        "doubled": lambda x: [x.grad.mul_(2)].clear(),
        "none": lambda x: setattr(x, "grad", None),
        "sparse": lambda x: setattr(x, "grad", x.grad.to_sparse()),
    }
    if everywhere or late():
        p.register_post_accumulate_grad_hook(edits[edit])
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), **OPTIONS[options])
    sent = [value(rank) for rank in range(hvd.size())]
    for rank in range(0 if everywhere else hvd.size() - 1, hvd.size()):
        sent[rank] = {
            "another tensor": value(rank, 2), "doubled": 2 * value(rank), "none": 0.0
        }.get(edit, value(rank))  # fmt: skip
    for _ in range(2):
        optimizer.zero_grad()
        push_each((p, 0), (q, 1))
        if everywhere and edit == "none":
            assert p.grad is None
        else:
            assert p.grad is not None
            assert p.grad.to_dense().tolist() == [sum(sent) / hvd.size()] * 4
        grad_is(q, total(hvd.Average, [1]))
        optimizer.step()


# ---- frozen in mid-training


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("when", ["between steps", "between passes", "in a hook"])
def test_frozen(when: str, everywhere: bool, options: str) -> None:
    (p, q), optimizer = toys(2, **OPTIONS[options])
    push_each((p, 0), (q, 1))
    optimizer.step()
    optimizer.zero_grad()
    mine = everywhere or late()
    if when == "between passes":
        with optimizer.no_sync():
            push_each((p, 0), (q, 1))
    if mine and when != "in a hook":
        q.requires_grad_(False)

    def passes() -> None:
        hook = p.register_hook(lambda _: [q.requires_grad_(not mine)].clear())
        if when != "in a hook":
            hook.remove()
        push_each((p, 2), *([] if when != "in a hook" and mine else [(q, 3)]))
        hook.remove()

    if not failed(passes):
        grad_is(p, total(hvd.Average, [0, 2] if when == "between passes" else [2]))
        sent = [1.0 * (when == "between passes")] * hvd.size()
        sums = [s * value(rank, 1) for rank, s in enumerate(sent)]
        for rank in range(hvd.size()):
            if when == "in a hook" or not (everywhere or rank == hvd.size() - 1):
                sums[rank] += value(rank, 3)
        if not any(sums):
            assert q.grad is None
        else:
            grad_is(q, sum(sums) / hvd.size())
        optimizer.step()
    q.requires_grad_(True)
    trains([p, q], optimizer)


# ---- steps


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    "what", ["step", "synchronize", "two steps", "zero_grad", "step in no_sync"]
)
def test_without_a_pass(what: str, everywhere: bool, options: str) -> None:
    (p, q), optimizer = toys(2, **OPTIONS[options])

    def wrong() -> None:
        if what == "synchronize":
            optimizer.synchronize()
        if what == "zero_grad":
            optimizer.zero_grad()
        if what == "step in no_sync":
            with optimizer.no_sync():
                push_each((p, 0), (q, 1))
                optimizer.step()
        elif what != "synchronize":
            optimizer.step()
        if what in ("two steps", "synchronize"):
            optimizer.step()

    def right() -> None:
        push_each((p, 0), (q, 1))
        optimizer.step()
        if what == "two steps":
            push_each((p, 0), (q, 1))
            optimizer.step()

    for _ in range(2):
        optimizer.zero_grad()
        before = p.detach().clone()
        if not failed(wrong if everywhere or late() else right):
            ranks = range(hvd.size() - (what != "step in no_sync"))
            if everywhere and what != "step in no_sync":
                ranks = range(0)
            assert (before - p)[0] == sum(value(rank) for rank in ranks) / hvd.size()
        trains([p, q], optimizer)


# ---- passes and steps within a pass


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("place", ["before", "after", "of the other"])
def test_a_pass_in_a_hook(place: str, everywhere: bool, options: str) -> None:
    """`place`: whether p's own gradient has arrived then."""
    (p, q), optimizer = toys(2, **OPTIONS[options])
    mine = everywhere or late()

    def again(x: Tensor) -> None:
        hook.remove()
        with torch.enable_grad():
            push_each((p, 2), (q, 3))

    for _ in range(2):
        if mine and place == "after":
            hook = p.register_post_accumulate_grad_hook(again)
        elif mine:
            hook = (p if place == "before" else q).register_hook(again)
        optimizer.zero_grad()
        push_each((p, 0), (q, 1))
        ranks = range(0 if everywhere else hvd.size() - 1, hvd.size())
        for x, k in ((p, 0), (q, 1)):
            more = sum(value(rank, k + 2) for rank in ranks) / hvd.size()
            grad_is(x, total(hvd.Average, [k]) + more)
        optimizer.step()
    trains([p, q], optimizer)


@every_option
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_for_each_parameter_steps_in_its_hook(
    early: bool, op: int, options: str
) -> None:
    """`early`: the user's hooks run before farandole's."""
    ps = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizers: dict[Tensor, Any] = {}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    def hook() -> None:
        for p in ps:
            p.register_post_accumulate_grad_hook(step)

    if early:
        hook()
    for p in ps:
        plain = torch.optim.SGD([p], lr=1.0)
        optimizers[p] = hvd.DistributedOptimizer(plain, op=op, **OPTIONS[options])
    if not early:
        hook()
    for k in range(3):
        push_each((ps[0], k), (ps[1], k + 1))
    for first, p in enumerate(ps):
        expected = -sum(total(op, [first + k]) for k in range(3))
        assert p.tolist() == [expected] * 4


@every_option
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("call", ["step", "synchronize", "zero_grad"])
def test_a_call_in_a_hook(call: str, everywhere: bool, options: str) -> None:
    (p, q), optimizer = toys(2, **OPTIONS[options])
    MPI.COMM_WORLD.Barrier()  # all have made theirs
    if everywhere or late():
        p.register_post_accumulate_grad_hook(lambda _: getattr(optimizer, call)())

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            push_each((p, 0), (q, 1))
            grad_is(p, total(hvd.Average, [0]))
            grad_is(q, total(hvd.Average, [1]))
            optimizer.step()

    if failed(train):
        restart()
