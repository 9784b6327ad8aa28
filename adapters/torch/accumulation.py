# SPDX-License-Identifier: Apache-2.0
"""Hooks around autograd's accumulation into one parameter's `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AccumulationHooks"]


class AccumulationHooks:
    """Calls `before()` and `after(parameter)`.

    Before an accumulation it is autograd's node that is listened to: hooks of the tensor itself
    also run for torch.autograd.grad, which accumulates nothing.
    """

    def __init__(
        self, parameter: Tensor, before: Callable[[Any], None], after: Callable[[Tensor], None]
    ) -> None:
        """The parameter requires a gradient."""
        self._parameter = parameter
        self._before = before
        self._follow()
        hook: Any = parameter.register_post_accumulate_grad_hook
        self._remove_after: Callable[[], None] = hook(after).remove

    def _follow(self) -> None:
        parameter: Any = self._parameter
        with torch.inference_mode(False), torch.enable_grad():
            self._node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        self._shape = parameter.shape
        self._remove_before: Callable[[], None] = self._node.register_prehook(self._before).remove

    def follow(self) -> None:
        """The parameter has become another one for autograd: `p.data = x` of another dtype."""
        self._remove_before()
        self._node = None  # which autograd would else go on to use, whatever the shape
        self._follow()

    def check(self) -> None:
        """Follows where `p.data = x` was of another shape: of that autograd takes no notice."""
        if self._parameter.shape != self._shape:
            self.follow()

    def remove(self) -> None:
        """Calls nobody any more."""
        self._remove_before()
        self._remove_after()
        self._node = None
