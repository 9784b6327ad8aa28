# SPDX-License-Identifier: Apache-2.0
"""ShardedGrad, the tensor that is `.grad` after a reduction of which each rank keeps a part. Any
thread of the user's may touch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.torch.extension import map_nested

_FORM = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "_base")),
    *(getattr(Tensor, name).__get__ for name in ("grad_fn", "requires_grad", "is_leaf")),
    *(Tensor._version.__get__, Tensor.requires_grad_, Tensor.element_size),  # type: ignore[attr-defined]
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
}
# What is done to each element by itself, so to a part as to the whole. Methods without underscores.
_METHODS = frozenset(
    (
        *("add", "iadd", "radd", "sub", "isub", "mul", "imul", "rmul", "div", "idiv", "truediv"),
        *("itruediv", "neg", "clamp", "clip", "nantonum", "zero", "copy", "to", "detach", "clone"),
    )
)
_LISTS = frozenset(
    f"_foreach_{name}_" for name in ("zero", "mul", "div", "add", "clamp_min", "clamp_max", "neg")
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # what torch's GradScaler calls


class ShardedGrad(Tensor):
    """A tensor of the parameter's form of which this rank has the elements that it keeps.

    What is done to each element by itself works, such as zeroing, scaling and clamping, and what
    GradScaler does. Everything else raises RuntimeError, since it would see a part only.
    """

    shard: Tensor
    whose: str  # the name of its parameter
    _agree: Callable[[Tensor], None]

    @staticmethod
    def __new__(
        cls, like: Tensor, shard: Tensor, name: str, agree: Callable[[Tensor], None]
    ) -> ShardedGrad:
        """`like` is the parameter, `shard` has the elements that this rank keeps.

        `agree` makes a GradScaler's flag that of all ranks.
        """
        make: Callable[..., ShardedGrad] = Tensor._make_wrapper_subclass
        grad = make(cls, like.shape, strides=like.stride(), dtype=shard.dtype, device=shard.device)
        grad.shard, grad.whose, grad._agree = shard, name, agree
        return grad

    def __repr__(self) -> str:  # type: ignore[override]
        """Says what it is, without values."""
        return f"ShardedGrad({self.whose}, shape={tuple(self.shape)})"

    def _refuse(self, func: Any) -> RuntimeError:
        return RuntimeError(
            f"{getattr(func, '__name__', func)} of the gradient of {self.whose}: with "
            "shard_state=True each rank has a part of it only; to clip, call "
            "optimizer.clip_grad_norm_(), not torch.nn.utils.clip_grad_norm_(); convert models "
            "before DistributedOptimizer"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: list[ShardedGrad] = []
        map_nested((args, tuple(kwargs.values())), ShardedGrad, found.append)
        name = str(getattr(func, "__name__", func))
        if name == _UNSCALE:
            func(map_nested(args[0], ShardedGrad, _shard), *args[1:])
            found[0]._agree(args[1])
            return None
        if name.replace("_", "") not in _METHODS and name not in _LISTS:
            raise found[0]._refuse(func)

        def narrowed(x: Tensor) -> Tensor:
            if isinstance(x, ShardedGrad):
                return x.shard
            if x.dim() > 0:
                raise found[0]._refuse(func)
            return x

        result = func(
            *map_nested(args, Tensor, narrowed),
            **{k: map_nested(v, Tensor, narrowed) for k, v in kwargs.items()},
        )
        if not isinstance(result, Tensor):
            return result
        own = next((x for x in found if x.shard is result), None)
        if own is not None:
            return own
        return ShardedGrad(found[0], result, found[0].whose, found[0]._agree)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a mark, no method
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for uses by C++ code, such as autograd's accumulation."""
        return cls.__torch_function__(func, types, args, kwargs)


def _shard(x: ShardedGrad) -> Tensor:
    return x.shard
