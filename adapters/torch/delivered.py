# SPDX-License-Identifier: Apache-2.0
"""The last result that has become a parameter's `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

__all__ = ["Delivered"]


def _none() -> None:
    return None


class Delivered:
    """Tells it from gradients that are this rank's own, without keeping it alive."""

    __slots__ = ("_tensor", "_version", "turn")

    def __init__(self) -> None:
        self._tensor: Callable[[], Tensor | None] = _none
        self._version = -1
        self.turn = -1  # the optimizer's step in which it came

    def note(self, grad: Tensor | None, turn: int) -> None:
        """`grad` is it, in this step of the optimizer. None: what becomes of it cannot be told."""
        self.turn = turn
        if grad is None:
            self._tensor = _none
        else:
            self._tensor, self._version = weakref.ref(grad), grad._version

    def stepped(self) -> None:
        """The optimizer has stepped: what is written to `.grad` from now on is a new gradient."""
        grad = self._tensor()
        if grad is not None:
            self._version = grad._version

    def holds(self, grad: Tensor, turn: int) -> bool:
        """Whether `grad` is it: until the next step whatever the user does to it, from then on as
        long as nobody has written to it."""
        return grad is self._tensor() and (self.turn == turn or grad._version == self._version)
