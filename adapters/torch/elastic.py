# SPDX-License-Identifier: Apache-2.0
"""Elastic training with torch: TorchState, and handlers for the objects in it.

There are handlers for models, optimizers, samplers and tensors. All are used on the training loop's
thread.
"""

from __future__ import annotations

from typing import Any, Generic

import torch
from typing_extensions import TypeVar  # torch itself depends on it

from farandole.elastic import ObjectState, State, run
from farandole.handlers import StateHandler, register, registry
from farandole.torch import blocks as _  # noqa: F401  # lets commits hold tensors
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.sampler import ElasticSampler
from farandole.torch.state import lay_out

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]

M = TypeVar("M", bound=torch.nn.Module, default=Any)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer, default=Any)


class ModelStateHandler(StateHandler[torch.nn.Module]):
    """Holds a module, and saves its parameters and buffers."""

    def sync(self) -> None:
        """Broadcasts rank 0's parameters and buffers one by one, then saves them; collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler[torch.optim.Optimizer]):
    """Holds an optimizer, distributed or not."""

    def restore(self) -> None:
        """Drops unfinished reductions, resets the gradients and restores the last copy."""
        reducer = getattr(self.value, "_reducer", None)
        if reducer is not None:
            reducer.drop()
        self.value.zero_grad()
        super().restore()
        lay_out(self.value)

    def sync(self) -> None:
        """Broadcasts rank 0's optimizer state, then saves it; collective."""
        reducer = getattr(self.value, "_reducer", None)
        if reducer is not None and not reducer.has_name:
            reducer.choose_name(0)  # sync() is collective, so all ranks use the same order
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """Holds an ElasticSampler."""

    def reset(self) -> None:
        """Divides the remaining samples among the present ranks."""
        self.value.reset()


class TensorStateHandler(StateHandler[torch.Tensor]):
    """Holds a tensor that an optimizer may refer to, so restore() changes it in place."""

    def save(self) -> None:
        """Stores a copy of the elements."""
        self.saved = self.value.detach().clone()

    def restore(self) -> None:
        """Restores the elements in place."""
        with torch.no_grad():
            self.value.copy_(self.saved)

    def sync(self) -> None:
        """Broadcasts rank 0's elements, then saves them; collective."""
        broadcast_parameters({"tensor": self.value}, root_rank=0)
        self.save()


class _Trained(type):
    """Decides which tensors are instances of TrainedTensor."""

    def __instancecheck__(cls, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        leaf = value.requires_grad and value.is_leaf
        return leaf or isinstance(value, torch.nn.Parameter)


class TrainedTensor(metaclass=_Trained):
    """Matches all parameters, and other leaf tensors that require a gradient."""


register(
    [
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
        (TrainedTensor, TensorStateHandler),
    ]
)


def get_handler_registry() -> list[tuple[type, type[StateHandler[Any]]]]:
    """Returns the list of (type, handler) pairs. An object gets the first handler that matches."""
    return list(registry)


def set_handler_registry(entries: list[tuple[type, type[StateHandler[Any]]]]) -> None:
    """Replaces the list of (type, handler) pairs."""
    registry[:] = entries


class TorchState(ObjectState, Generic[M, Opt]):
    """State of an elastic training loop.

    An example is TorchState(model, optimizer, sampler=sampler, epoch=0). Each argument becomes an
    attribute, as in ObjectState.
    """

    model: M
    optimizer: Opt

    def __init__(
        self,
        model: M | None = None,
        optimizer: Opt | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: x for name, x in given.items() if x is not None}, **kwargs)
