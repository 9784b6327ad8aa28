# SPDX-License-Identifier: Apache-2.0
"""What a Gradient puts into `.grad`: a PendingGrad while it is being reduced, which any thread of
the user's may touch, then a result, which Delivered remembers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.torch.state import map_nested

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient

# Attributes that hooks may read of a gradient before it is reduced.
FORM = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
}


class PendingGrad(Tensor):
    """A tensor without memory of its own: its first use waits for the reduction.

    The gradient itself belongs to the core until then. Code that reads or writes `.grad` after
    backward() gets the reduced gradient, as after synchronize(). Only hooks within a backward pass
    get an error, since other gradients are still to come. AsyncCollectiveTensor of
    torch.distributed works in the same way.
    """

    _gradient: Gradient
    _result: Tensor | None  # after the reduction, for code that still holds this object

    @staticmethod
    def __new__(cls, gradient: Gradient) -> PendingGrad:
        """Has the form of the gradient's parameter."""
        p = gradient.parameter
        make: Callable[..., PendingGrad] = Tensor._make_wrapper_subclass
        pending = make(cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device)
        pending._gradient = gradient
        pending._result = None
        return pending

    def resolve(self) -> Tensor:
        """The reduced gradient. Waits for it, as synchronize() does.

        Raises RuntimeError in a backward pass, and if it has been reset meanwhile.
        """
        known, gradient = self._result, self._gradient
        if known is not None:
            return known
        if torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(
                f"the gradient of {gradient.name} is being reduced while this backward pass goes "
                "on; in hooks use the gradient that they are given, or register them before "
                "DistributedOptimizer is made"
            )
        gradient.reducer.touched(gradient, self)
        if self._result is None:
            raise RuntimeError(
                f"the gradient of {gradient.name} has been reset before it was reduced: use "
                "DistributedOptimizer(..., complete_after_backward=True), or call "
                "optimizer.synchronize() after backward() to keep it"
            )
        return self._result

    def part_with(self, result: Tensor | None) -> PendingGrad:
        """Fixes this object's result, for code that still holds it; returns a new object."""
        self._result = result
        return PendingGrad(self._gradient)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FORM and torch._C._current_graph_task_id() >= 0:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args = map_nested(args, PendingGrad, PendingGrad.resolve)
        kwargs = map_nested(kwargs, PendingGrad, PendingGrad.resolve)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a mark, no method
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for uses by C++ code, such as autograd's after `p.data = x`."""
        return cls.__torch_function__(func, types, args, kwargs)


def _gone() -> None:
    """In the place of a weak reference: there is no tensor."""


class Delivered:
    """Distinguishes the last result from this rank's own gradients, without keeping it alive.

    Each Gradient has one; autograd's threads and the one that steps use it in turn.
    """

    __slots__ = ("_tensor", "_version", "turn")

    def __init__(self) -> None:
        self._tensor: Callable[[], Tensor | None] = _gone
        self._version = -1
        self.turn = -1  # number of the optimizer's step in which it was delivered

    def note(self, grad: Tensor | None, turn: int) -> None:
        """Notes `grad` as delivered in step `turn`. None: changes to it could not be noticed."""
        self.turn = turn
        if grad is None:
            self._tensor = _gone
        else:
            self._tensor, self._version = weakref.ref(grad), grad._version

    def stepped(self) -> None:
        """The optimizer has stepped: what is written to `.grad` from now on is a new gradient."""
        grad = self._tensor()
        if grad is not None:
            self._version = grad._version

    def changed(self, grad: Tensor | None, turn: int) -> bool:
        """Whether what was delivered in step `turn` was written to, or is not `grad` any more."""
        if self.turn != turn or self._tensor is _gone:
            return False
        return grad is None or grad is not self._tensor() or grad._version != self._version

    def is_zeroed(self, grad: Tensor) -> bool:
        """Whether `grad` is it, and was set to zeros since."""
        written = grad is self._tensor() and grad._version != self._version
        return written and not bool(grad.any())

    def holds(self, grad: Tensor, turn: int) -> bool:
        """Whether `grad` is it. Until the next step the user may write to it; after that a write
        makes it a new gradient."""
        return grad is self._tensor() and (self.turn == turn or grad._version == self._version)
