# SPDX-License-Identifier: Apache-2.0
"""Elastic training: a state that is committed, and a loop that goes back to it after a failure.

@farandole.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 10):
        ...
        state.commit()

The world is the one that mpirun started: when a rank has died for good, starting anew fails, and
the error is raised.
"""

from __future__ import annotations

import copy
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from farandole import ops, runtime
from farandole.errors import HostsUpdatedInterrupt, LibraryError, PeerError, StallError
from farandole.objects import broadcast_object
from farandole.start import leaving

__all__ = ["RETRIED", "ObjectState", "State", "run", "run_fn"]

R = TypeVar("R")

# What another attempt may mend. A mistake of the program, such as MismatchError, is not among it.
RETRIED = (PeerError, StallError, LibraryError)

_REMOVED, _ADDED = 1, 2  # bits of what on_hosts_updated is told


class State(ABC):
    """What training needs to go on: equal on all ranks after sync()."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._updates = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Has these called, in order, whenever the runtime has been started anew."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The runtime has been started anew: resets this state, then calls the callbacks."""
        with self._lock:
            self._updates = 0
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float = 0.0, update_res: int = _ADDED) -> None:
        """Notes that hosts were removed (1), added (2) or both (3); any thread may call this."""
        with self._lock:
            self._updates |= int(update_res)

    def commit(self) -> None:
        """Saves, then checks for host updates; collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks where any has noted an update; collective."""
        with self._lock:
            updates = self._updates
        noted = np.array([updates & _REMOVED, updates & _ADDED], np.uint8)
        ops.allreduce_(noted, op=ops.Max, name="farandole.elastic.hosts")
        if noted.any():
            raise HostsUpdatedInterrupt(skip_sync=not noted[1])

    def reset(self) -> None:  # noqa: B027
        """What depends on the number of ranks adapts to it."""

    @abstractmethod
    def save(self) -> None:
        """Keeps a copy of the state in this process's memory."""

    @abstractmethod
    def restore(self) -> None:
        """Goes back to the last copy."""

    @abstractmethod
    def sync(self) -> None:
        """Makes all ranks' states that of rank 0, and saves; collective."""


class ObjectState(State):
    """Attributes of any type that can be copied and pickled: ObjectState(epoch=0, batch=0)."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self._names = tuple(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._saved = copy.deepcopy(attributes)

    def save(self) -> None:
        """As in State."""
        self._saved = copy.deepcopy(self._attributes())

    def restore(self) -> None:
        """As in State."""
        self._assign(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """As in State."""
        self._assign(broadcast_object(self._attributes(), 0, name="farandole.elastic.objects"))
        ObjectState.save(self)

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _assign(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., R], reset: Callable[[], None] = runtime.restart) -> Callable[..., R]:
    """`func(state, ...)` in a loop: synchronised first, and again after each failure.

    After an error in RETRIED the last commit is restored, after HostsUpdatedInterrupt the state
    stays; then comes `reset`, whose own error ends the loop. Every other error is raised, and ends
    the training of the others too: they get a PeerError with it, and do not start anew.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        try:
            result = attempts(state, *args, **kwargs)
        except BaseException as error:
            runtime.end_training(leaving.describe(error))
            raise
        runtime.end_training("its elastic training has ended normally")
        return result

    def attempts(state: State, *args: Any, **kwargs: Any) -> R:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except RETRIED:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper


def run(func: Callable[..., R]) -> Callable[..., R]:
    """The decorator for a training function whose first argument is a State; see run_fn."""
    return run_fn(func)
