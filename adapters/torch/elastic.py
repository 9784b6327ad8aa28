# SPDX-License-Identifier: Apache-2.0
"""Elastic training with torch: models, optimizers and samplers as parts of a state. For users'
training loops, on their thread."""

from __future__ import annotations

import copy
from typing import Any, Generic

import torch
from typing_extensions import TypeVar  # which torch itself needs

from farandole.elastic import ObjectState, State, run
from farandole.objects import broadcast_object
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

T = TypeVar("T", bound=Any)
M = TypeVar("M", bound=torch.nn.Module, default=Any)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer, default=Any)


class StateHandler(Generic[T]):
    """How one kind of object is saved, restored and synchronised: by its state_dict."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.saved: Any = None
        self.save()

    def save(self) -> None:
        """Stores a copy of the state."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restores the copy."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Copies rank 0's state to all ranks; collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))
        self.save()

    def reset(self) -> None:
        """Called after a restart: the number of ranks may have changed."""

    def set_value(self, value: T) -> None:
        """Replaces the object."""
        self.value = value
        self.save()


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
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """An ElasticSampler."""

    def reset(self) -> None:
        """Divides the samples that are left among the present ranks."""
        self.value.reset()


_registry: list[tuple[type, type[StateHandler[Any]]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler[Any]]]]:
    """List of (type, its handler); the first matching type is used."""
    return list(_registry)


def set_handler_registry(registry: list[tuple[type, type[StateHandler[Any]]]]) -> None:
    """Replaces the registry for states made from now on."""
    _registry[:] = registry


class TorchState(ObjectState, Generic[M, Opt]):
    """TorchState(model, optimizer, sampler=sampler, epoch=0): each argument is an attribute.

    Objects of types in the registry have a handler; all others are as in ObjectState.
    """

    model: M
    optimizer: Opt
    _handlers: dict[str, StateHandler[Any]]

    def __init__(
        self,
        model: M | None = None,
        optimizer: Opt | None = None,
        **kwargs: Any,
    ) -> None:
        self.__dict__["_handlers"] = {}
        given = {"model": model, "optimizer": optimizer, **kwargs}
        objects = {}
        for name, value in given.items():
            kinds = [handler for kind, handler in _registry if isinstance(value, kind)]
            if kinds:
                self._handlers[name] = kinds[0](value)
                self.__dict__[name] = value
            elif value is not None or name in kwargs:
                objects[name] = value
        super().__init__(**objects)

    def save(self) -> None:
        """Keeps a copy of all attributes in this process's memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restores the last copy of all attributes."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copies rank 0's attributes to all ranks, and saves; collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapts samplers and other handled objects to the number of ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def saved(self) -> dict[str, Any]:
        """The last copy of every attribute, by name."""
        handled = {name: handler.saved for name, handler in self._handlers.items()}
        return {**super().saved(), **handled}

    def restore_from(self, saved: dict[str, Any]) -> None:
        """Restores attributes from what saved() has given; others keep their last copy."""
        objects = dict(saved)
        for name, handler in self._handlers.items():
            handler.saved = objects.pop(name, handler.saved)
        super().restore_from(objects)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)
