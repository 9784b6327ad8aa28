# SPDX-License-Identifier: Apache-2.0
"""What `.grad` is while the gradient is being reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.torch.nested import map_nested

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient

__all__ = ["PendingGrad"]

# What code in hooks may ask of a gradient before it is reduced.
_FORM = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
}


class PendingGrad(Tensor):
    """A tensor without memory of its own: the first use of it waits for the reduction.

    The gradient itself is the core's until then. Whoever reads or writes `.grad` after backward()
    gets what synchronize() gives: the reduced gradient. Only hooks that run within a backward pass
    are refused, since other gradients are still to come. AsyncCollectiveTensor of
    torch.distributed waits by the same means.
    """

    _gradient: Gradient
    _result: Tensor | None  # once the reduction is over, for whoever has kept this object

    @staticmethod
    def __new__(cls, gradient: Gradient) -> PendingGrad:
        """In the form of the gradient's parameter."""
        p = gradient.parameter
        make: Callable[..., PendingGrad] = Tensor._make_wrapper_subclass
        pending = make(cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device)
        pending._gradient = gradient
        pending._result = None
        return pending

    def resolve(self) -> Tensor:
        """The reduced gradient. Waits for it, as synchronize() does.

        Raises RuntimeError in a backward pass, and where it has been reset meanwhile.
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
                f"the gradient of {gradient.name} has been reset before it was reduced: call "
                "optimizer.synchronize() after backward() to keep it"
            )
        return self._result

    def part_with(self, result: Tensor | None) -> PendingGrad:
        """Whoever has kept this object shall see that result, not later ones. Gives a new one."""
        self._result = result
        return PendingGrad(self._gradient)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FORM and torch._C._current_graph_task_id() >= 0:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args = map_nested(args, PendingGrad, PendingGrad.resolve)
        kwargs = map_nested(kwargs, PendingGrad, PendingGrad.resolve)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a mark, no method
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below Python's calls: C++ code has found it, as autograd would after `p.data = x`."""
        raise RuntimeError(
            f"{func} has met a gradient that is being reduced; call optimizer.synchronize() first"
        )
