# SPDX-License-Identifier: Apache-2.0
"""What the user has reset of the gradients that were sent, as ranks compare it. For the Reducer and
Gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farandole.torch.gradients.passes import task_id

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Reducer

ALL_RESET = 1  # all that this rank has sent: another rank may have sent other gradients


def what_is_reset(gradients: Sequence[Gradient]) -> int:
    """ALL_RESET, 0 for none, or a number that is equal on ranks with the same ones."""
    gone = [i for i, g in enumerate(gradients) if g.handle is not None and g.is_reset()]
    if not gone:
        return 0
    sent = [g for g in gradients if g.has_sent()]
    if sent and all(g.parameter.grad is None for g in sent):
        return ALL_RESET
    return hash(tuple(gone)) >> 8  # some of them, or replaced


def begin_task(reducer: Reducer) -> None:
    """Ends what the user has reset by other means than the optimizer's zero_grad(): the round, and
    the count of this step's passes. To be called before the first gradient of one of autograd's
    tasks arrives, on all ranks alike: that gradient may be one which few ranks have sent."""
    reducer.passes.task = task_id()
    reducer.arrivals.send()  # of a pass that an exception has ended
    sent = reducer.round.sent
    if sent and sent[0].is_reset():
        reducer.drop()
    if not reducer.passes.mean or not reducer.passes.seen:
        return
    grads = [(g.delivered, g.parameter.grad) for g in reducer.gradients]
    if all(grad is None or delivered.is_zeroed(grad) for delivered, grad in grads):
        count_anew(reducer)


def count_anew(reducer: Reducer) -> None:
    """Begins a step's passes again: nothing is left of those before."""
    reducer.passes.count_anew()
    await_arrivals(reducer)


def await_arrivals(reducer: Reducer) -> None:
    """Sets the number of arrivals that each gradient awaits before it is sent."""
    for gradient in reducer.gradients:
        gradient.left = reducer.passes.wanted
