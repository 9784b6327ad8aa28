# SPDX-License-Identifier: Apache-2.0
"""Settles gradients: stores finished results in `.grad`. For the Reducer, at the end of a round.

Everything here may run again, from its beginning, after a signal handler's exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from farandole.torch.grad_mode import without_grad
from farandole.torch.gradients.aliases import complaint_of, fitted, spoiled_text
from farandole.torch.gradients.gradient import NOT_KEPT, Gradient, Verdict

_wire, _parameter = attrgetter("wire"), attrgetter("parameter")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_set_grad: Any = _base.grad.__set__


def settle_plain(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Settles those that are `plain`, quickly; returns the others. None may have been reset."""
    plain = [gradient for gradient in gradients if gradient.plain]
    wires = [*map(_wire, plain)]
    try:
        deque(map(_set_grad, map(_parameter, plain), wires), 0)
    except RuntimeError:  # a parameter's form has changed: `model.half()`, `p.data = x`
        return [*gradients]
    for gradient, wire in zip(plain, wires, strict=True):
        gradient.deliver(wire)
        gradient.plain = False
        gradient.handle = gradient.wire = gradient.unsent = None
    return [gradient for gradient in gradients if gradient.handle is not None]


@without_grad
def settle(gradients: Sequence[Gradient], keep: bool) -> None:
    """Settles them; tells the Reducer if one was written to while it was reduced.

    Not `keep`: the round is dropped; gradients that were reset or not sent stay unchanged.
    """
    for gradient in gradients:
        _settle(gradient, keep)


def _settle(gradient: Gradient, keep: bool) -> None:
    if gradient.verdict is None:  # what follows changes what it is judged by
        gradient.verdict = _judge(gradient, keep)
    store, complaint = gradient.verdict
    complaint = store(gradient) or complaint
    reducer = gradient.reducer
    reducer.complaint = reducer.complaint or complaint
    gradient.divisor = reducer.passes.divisor
    gradient.leave_round()


def _judge(gradient: Gradient, keep: bool) -> Verdict:
    """Changes nothing."""
    grad = gradient.parameter.grad
    delivered = gradient.plain and grad is gradient.wire  # settle_plain() was interrupted
    reset = grad is not gradient.shown and not delivered
    if gradient.sparse_dim:
        return (_lose if reset else _restore), None
    if gradient.absent and not keep:
        return _nothing, None
    if reset:  # None: by the user; another tensor: an error
        spoiled = grad is not None and keep
        return _lose, spoiled_text(gradient.name, "replaced") if spoiled else None
    complaint = complaint_of(gradient, gradient.reducer.round.sent)
    return (_store if gradient.late is None else _set_aside), complaint


def _nothing(_gradient: Gradient) -> None:
    """It was sent without data, and the result is dropped."""


def _lose(gradient: Gradient) -> None:
    """The user has reset it, and may still hold the PendingGrad."""
    gradient.shown = None
    if getrefcount(gradient.pending) > NOT_KEPT:
        lost = gradient.absent or gradient.sparse_dim
        gradient.pending = gradient.pending.part_with(None if lost else _total(gradient))
    gradient.set_aside = None


def _restore(gradient: Gradient) -> None:
    """Shows an unsent sparse gradient again, for the next round."""
    gradient.parameter.grad = gradient.unsent
    if not gradient.encoding.missing(gradient.handle or 0):  # dense on other ranks
        gradient.set_aside = _total(gradient)


def _set_aside(gradient: Gradient) -> None:
    """Keeps the result apart from a gradient that has arrived after this one."""
    gradient.set_aside = _total(gradient)
    gradient.parameter.grad = gradient.late
    gradient.base_divisor = gradient.reducer.passes.divisor
    gradient.delivered.note(None, gradient.reducer.turn)
    gradient.reducer.again = True


def _store(gradient: Gradient) -> str | None:
    total, unfit = _total(gradient), None
    if gradient.parameter.grad is not total:
        total, unfit = fitted(total, gradient.parameter, gradient.name)
        gradient.parameter.grad = total
    if total is not None:
        gradient.deliver(total)
    gradient.set_aside = None
    return unfit


def _total(gradient: Gradient) -> Tensor | None:
    """set_aside plus result, in the memory of set_aside, else of the sent gradient."""
    g, view = gradient, gradient.view
    if g.total is None:
        g.total = _sum(g)
    total, into = g.total, g.set_aside
    if into is None and not (g.absent or g.late is not None or g.input is not None):
        into = g.unsent
    elif into is not None and view is not None and g.wire is view.tensor:
        into = view.tensor
    if total is None or into is None or total is into or into.layout is not total.layout:
        return total
    return into.copy_(total)


def _sum(gradient: Gradient) -> Tensor | None:
    g, base, divisor = gradient, gradient.set_aside, gradient.reducer.passes.divisor
    in_step = g.delivered.turn == g.reducer.turn
    if base is not None and in_step and g.base_divisor != divisor:
        base = base * (g.base_divisor / divisor)
    if g.absent and g.encoding.missing(g.handle or 0):
        return base
    assert g.wire is not None
    result = g.encoding.decode(g.wire, g.handle or 0)
    if g.divisor != divisor:
        result = result * (g.divisor / divisor)
    return result if base is None else base + result
