# SPDX-License-Identifier: Apache-2.0
"""Elastic training with Keras: states for models and optimizers, and callbacks for model.fit().

The callbacks commit the state within fit(). All of this works with any backend. Use it on the
training thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras

import farandole
from farandole import elastic
from farandole.elastic import ObjectState, State
from farandole.handlers import StateHandler, register
from farandole.keras.callbacks import assign, values_of, variables_of, write_back
from farandole.keras.optimizer import calls
from farandole.ops import broadcast_list

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "VariablesState",
    "run",
]

R = TypeVar("R")
P = ParamSpec("P")
S = TypeVar("S", bound=State)

# The name of the state's attribute that holds variables, and of the call that broadcasts them.
_VALUES = "keras.elastic"


class VariablesHandler(StateHandler[Any]):
    """Saves Keras or TensorFlow variables, or objects that have variables, as NumPy arrays."""

    def _variables(self) -> list[Any]:
        return list(getattr(self.value, "variables", None) or [self.value])

    def save(self) -> None:
        """Copies the values."""
        self.saved = values_of(self._variables())

    def restore(self) -> None:
        """Restores the values. Variables built after save() keep their present values."""
        variables = self._variables()[: len(self.saved)]
        assign(variables, self.saved[: len(variables)])

    def sync(self) -> None:
        """Copies rank 0's values to all ranks. This is a collective."""
        own = values_of(self._variables())
        counts = farandole.allgather_object(len(own), name=f"{_VALUES}.count")
        if len(set(counts)) > 1:
            raise ValueError(
                f"a {type(self.value).__name__} has {counts} variables by rank: build it on all "
                "ranks before training"
            )
        self.saved = broadcast_list(own, 0, name=_VALUES).wait()
        assign(self._variables(), self.saved)


class VariableList:
    """Wraps a list of variables as one object, so that a state can hold it as an attribute."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)


def _kinds() -> Iterator[type]:
    yield VariableList
    yield from (keras.Variable, keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    if (tf := sys.modules.get("tensorflow")) is not None:
        yield tf.Variable


register((kind, VariablesHandler) for kind in _kinds())


class VariablesState(ObjectState):
    """Saves variables as NumPy arrays, and attributes in the same way as ObjectState.

    `variables` are Keras or TensorFlow variables. Their structure must be the same on all ranks.
    """

    def __init__(self, variables: Sequence[Any], **attributes: Any) -> None:
        self.variables = list(variables)
        super().__init__(**{_VALUES: VariableList(variables)}, **attributes)


class KerasState(VariablesState):
    """State of a model, its optimizer and attributes: KerasState(model, batch=0, epoch=0).

    If `optimizer` is None, uses the optimizer that the model was compiled with. `backend` is
    accepted for compatibility with Horovod, and ignored. Raises ValueError if the model has no
    weights.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any
    ) -> None:
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        super().__init__(variables_of(model, self.optimizer), **attributes)
        weights = {id(variable) for variable in model.weights}
        self._random = [variable for variable in model.variables if id(variable) not in weights]
        # Random generators, of which each rank keeps its own state.
        self._states = values_of(self._random)

    def save(self) -> None:
        """Copies the model, the optimizer and the attributes in memory, even within fit()."""
        write_back(self.model)
        self._states = values_of(self._random)
        super().save()

    def restore(self) -> None:
        """Restores the last copy, including this rank's random generators."""
        assign(self._random, self._states)
        super().restore()

    def reset(self) -> None:
        """Drops the programs that JAX has compiled for the former ranks."""
        super().reset()
        if keras.backend.backend() == "jax":
            import jax

            jax.clear_caches()


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state after every `batches_per_commit` batches, and after each epoch.

    Put it last, so that it also commits what other callbacks write to the state.

    Examples:
        >>> commits = hvd.elastic.CommitStateCallback(farandole.elastic.ObjectState(batch=0))
    """

    def __init__(self, state: elastic.State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit is {batches_per_commit}: pass 1 or more")
        self._state, self._every = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras hook that restarts the count, so that new ranks commit together with the others."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras hook that commits after every `batches_per_commit` batches."""
        self._batches += 1
        if self._batches % self._every == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that commits."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.batch` to the epoch's number of finished batches, and to 0 when the epoch ends.

    Keras 3 does not let a callback shorten an epoch. An interrupted epoch therefore starts again,
    unless the training function passes only the remaining batches to fit().

    Examples:
        >>> state = farandole.elastic.ObjectState(batch=0)
        >>> callback = hvd.elastic.UpdateBatchStateCallback(state)
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras hook that counts the batch."""
        self._state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that sets the count to 0."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.epoch` to the number of finished epochs, including those of earlier attempts.

    Pass fit() either `epochs=all_epochs, initial_epoch=state.epoch` or
    `epochs=all_epochs - state.epoch`.

    Examples:
        >>> state = farandole.elastic.ObjectState(epoch=0)
        >>> callback = hvd.elastic.UpdateEpochStateCallback(state)
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that counts the epoch."""
        self._state.epoch += 1


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a training function whose first argument is a state, like farandole.elastic.run.

    An error of the Keras backend may show that a rank is lost, just as farandole's errors do.

    Examples:
        >>> hvd.elastic.run(lambda state: state.epoch)(farandole.elastic.ObjectState(epoch=3))
        3
    """
    typed = getattr(calls(), "typed_errors", None)
    return elastic.run(typed()(func) if typed else func)
