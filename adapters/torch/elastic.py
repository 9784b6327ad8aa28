# SPDX-License-Identifier: Apache-2.0
"""Elastic training with torch: models, optimizers and samplers as parts of a state. For users'
training loops, on their thread."""

from __future__ import annotations

from typing import Any, Generic

import torch
from typing_extensions import TypeVar  # which torch itself needs

from farandole.elastic import ObjectState, State, run
from farandole.handlers import StateHandler, register, registry
from farandole.torch import blocks as _  # noqa: F401  # registers how commits hold tensors
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
    """Parameters and buffers; broadcast tensor by tensor."""

    def sync(self) -> None:
        """Broadcasts rank 0's parameters and buffers tensor by tensor, and saves; collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler[torch.optim.Optimizer]):
    """An optimizer, distributed or not."""

    def restore(self) -> None:
        """Restores the last copy, abandons reductions under way and resets the gradients."""
        reducer = getattr(self.value, "_reducer", None)
        if reducer is not None:
            reducer.abandon()
        self.value.zero_grad()
        super().restore()
        lay_out(self.value)

    def sync(self) -> None:
        """Broadcasts rank 0's optimizer state, and saves; collective."""
        reducer = getattr(self.value, "_reducer", None)
        if reducer is not None and not reducer.has_name:
            reducer.choose_name(0)  # here all ranks are in step, whatever each did before
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """An ElasticSampler."""

    def reset(self) -> None:
        """Divides the samples that are left among the present ranks."""
        self.value.reset()


class TensorStateHandler(StateHandler[torch.Tensor]):
    """A parameter, or a tensor that is trained: an optimizer refers to it."""

    def save(self) -> None:
        """Stores a copy of the elements."""
        self.saved = self.value.detach().clone()

    def restore(self) -> None:
        """Restores the elements in place."""
        with torch.no_grad():
            self.value.copy_(self.saved)

    def sync(self) -> None:
        """Broadcasts rank 0's elements, and saves; collective."""
        broadcast_parameters({"tensor": self.value}, root_rank=0)
        self.save()


class _Trained(type):
    """The metaclass of a type whose instances are the tensors that an optimizer may refer to."""

    def __instancecheck__(cls, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        leaf = value.requires_grad and value.is_leaf
        return leaf or isinstance(value, torch.nn.Parameter)


class TrainedTensor(metaclass=_Trained):
    """The type of parameters, and of other leaves that require a gradient."""


register(
    [
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
        (TrainedTensor, TensorStateHandler),
    ]
)


def get_handler_registry() -> list[tuple[type, type[StateHandler[Any]]]]:
    """List of (type, its handler); the first matching type is used."""
    return list(registry)


def set_handler_registry(entries: list[tuple[type, type[StateHandler[Any]]]]) -> None:
    """Replaces the registry, which farandole looks at whenever it finds an object."""
    registry[:] = entries


class TorchState(ObjectState, Generic[M, Opt]):
    """TorchState(model, optimizer, sampler=sampler, epoch=0): each argument is an attribute, as in
    ObjectState."""

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
