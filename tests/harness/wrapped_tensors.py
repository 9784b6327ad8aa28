# SPDX-License-Identifier: Apache-2.0
"""Tensors that hold no elements themselves, as other libraries and torch's own parts make them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["WRAPPED", "Held", "Wrapper", "inside"]


class Wrapper(Tensor):
    """As quantising libraries make their tensors: the values are those of another tensor."""

    values_of: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.values_of = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(x: Any) -> Any:
            return x.values_of if isinstance(x, Wrapper) else x

        result = function(*map(bare, args), **{k: bare(v) for k, v in (kwargs or {}).items()})
        return Wrapper(result) if isinstance(result, Tensor) else result


class Held(Tensor):
    """A harmless subclass: it holds its elements itself, although it sees every operation."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Held:
        return Tensor._make_subclass(cls, x)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def _dtensor(x: Tensor) -> Tensor:
    """On a mesh of this process alone."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
        )
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])


def _masked(x: Tensor) -> Tensor:
    from torch.masked import masked_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        return masked_tensor(x, torch.ones(x.shape, dtype=torch.bool))


def _fake(x: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


def _functional(x: Tensor) -> Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(x)


def _asynchronous(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(x)


# Name -> (what wraps a plain tensor, what the refusal says of the remedy).
WRAPPED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "DTensor": (_dtensor, "full_tensor"),
    "MaskedTensor": (_masked, "get_data"),
    "FakeTensor": (_fake, "FakeTensorMode"),
    "FunctionalTensor": (_functional, "functionalization"),
    "AsyncCollectiveTensor": (_asynchronous, "wait"),
    "Wrapper": (Wrapper, "it wraps other tensors"),
}


def inside(transform: str, x: Tensor, run: Callable[[Tensor], Any]) -> None:
    """Calls `run` with what one of torch.func's transforms makes of `x`: its class is Tensor."""

    def call(y: Tensor) -> Tensor:
        run(y)
        return y.sum()

    if transform == "vmap":
        torch.func.vmap(call)(x.expand(2, *x.shape).clone())
    elif transform == "grad":
        torch.func.grad(call)(x)
    else:
        torch.func.functionalize(call)(x)
