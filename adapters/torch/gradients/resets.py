# SPDX-License-Identifier: Apache-2.0
"""What the user has reset of the gradients that were sent, as ranks compare it. For the Reducer and
Gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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


def count_from_reset(reducer: Reducer) -> None:
    """Counts a step's passes anew if the user has reset all gradients that it had, by other means
    than the optimizer's zero_grad(). To be called before a gradient arrives."""
    if not reducer.passes.seen or not reducer.passes.in_new_task():
        return
    grads = [(g.delivered, g.parameter.grad) for g in reducer.gradients]
    if all(grad is None or delivered.is_zeroed(grad) for delivered, grad in grads):
        reducer.count_anew()
