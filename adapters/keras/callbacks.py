# SPDX-License-Identifier: Apache-2.0
"""Callbacks for model.fit() under Horovod's names, for any Keras 3 backend.

Keras calls them on the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import farandole
from farandole.calls.public_call import collective, errors_reach_peers, then
from farandole.calls.requests import Op
from farandole.errors import MismatchError, ranks_text, warn
from farandole.keras.optimizer import unreduced_optimizers
from farandole.members import ProcessSet, global_process_set
from farandole.ops import broadcast_list

_STATE, _METRICS = "keras.state", "keras.metrics"  # names of the calls


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the weights and optimizer state of `root_rank` before training.

    Random generators keep their own state on each rank. After the first batch, the callback warns
    if no DistributedOptimizer has reduced the gradients.

    Examples:
        >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """`device` and `local_variables` are ignored. They exist for compatibility with Horovod."""
        super().__init__()
        self._root, self._set = root_rank, process_set
        self._watched = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras hook that broadcasts the state."""
        broadcast_state(self.model, self._root, self._set)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras hook that checks the optimizer after the first batch."""
        if batch:
            self._watch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that checks the optimizer if the epoch had only one batch."""
        self._watch()

    def _watch(self) -> None:
        # A user's own train_step may reduce the gradients itself, without a DistributedOptimizer.
        own_step = type(self.model).train_step is not keras.Model.train_step
        if self._watched or own_step or not self._set.included() or self._set.size() == 1:
            return
        self._watched = True
        alone = unreduced_optimizers(self.model.optimizer)
        if alone:
            warn(
                f"fit() trains on this rank's gradients alone: {', '.join(alone)} did not reduce "
                "them. Pass hvd.DistributedOptimizer(optimizer) to model.compile(); if you wrapped "
                "the optimizer after an earlier fit(), call model.compile() again",
                UserWarning,
            )


@collective(Op.BROADCAST, unnamed=_STATE)
def broadcast_state(
    keras_model: Any,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> None:
    """Overwrites a model and its optimizer with the values of `root_rank`. This is a collective.

    The model and the optimizer must have the same structure on all ranks. Random generators keep
    their own state on each rank.

    - keras_model: a built Keras model. Its optimizer is included.
    - root_rank: the sender's rank in the world; it must be a member of the process set.
    - process_set: the ranks that take part, by default all.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
        >>> hvd.broadcast_state(model, root_rank=0)
    """
    variables = variables_of(keras_model, getattr(keras_model, "optimizer", None))
    values = values_of(variables)

    def meet() -> None:
        common: Any = {"name": _STATE, "process_set": process_set, "timeout": timeout}
        assign(variables, broadcast_list(values, root_rank, **common).wait())

    return then(meet)


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """Builds `optimizer`, which may be None. Returns the weights, then the optimizer's variables.

    Raises ValueError if the model has no weights.
    """
    if not getattr(model, "built", False):
        raise ValueError("the model has no weights yet: call model.build(input_shape) first")
    if optimizer is None:
        return list(model.weights)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*model.weights, *optimizer.variables]


def values_of(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Returns copies of the values of Keras or TensorFlow variables."""
    return [
        np.array(keras.ops.convert_to_numpy(v) if isinstance(v, keras.Variable) else v.numpy())
        for v in variables
    ]


def assign(variables: Sequence[Any], values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Assigns each value to its variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def write_back(model: Any) -> None:
    """Within fit() on JAX, copies values into variables, because Keras keeps them elsewhere."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the epoch's metrics over the ranks.

    Put it before callbacks that use metrics, such as ReduceLROnPlateau and checkpoints. Metrics may
    be vectors. Raises MismatchError on all ranks if names or shapes of metrics differ.

    Examples:
        >>> callback = hvd.callbacks.MetricAverageCallback()
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        """`device` is ignored. It exists for compatibility with Horovod."""
        super().__init__()
        self._set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that averages the metrics in `logs`."""
        with errors_reach_peers(self._set, _METRICS):
            own = {name: _array(value) for name, value in (logs or {}).items()}
        sent = farandole.rank(), own
        every = farandole.allgather_object(sent, name=_METRICS, process_set=self._set)
        known = dict(filter(None, every))  # a rank that has joined gives None
        for name in dict.fromkeys(name for metrics in known.values() for name in metrics):
            _check_metric(name, {rank: metrics.get(name) for rank, metrics in known.items()})
            mean = np.mean([metrics[name] for metrics in known.values()], axis=0)
            logs[name] = mean if mean.ndim else float(mean)


def _array(metric: Any) -> np.ndarray[Any, Any]:
    value = keras.ops.convert_to_numpy(metric) if keras.ops.is_tensor(metric) else metric
    return np.asarray(value, np.float64)


def _check_metric(name: str, values: dict[int, Any]) -> None:
    """Raises MismatchError unless all `values`, keyed by rank, have the same shape."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        text = "missing" if value is None else f"of shape {value.shape}"
        groups.setdefault(text, []).append(rank)
    if len(groups) > 1:
        found = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in groups.items())
        raise MismatchError(
            f"{_METRICS}: the metric {name} is {found}: pass the same metrics to model.compile() "
            "on all ranks, and validation_data to fit() on all or on none"
        )


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr` times `multiplier` from `start_epoch` to `end_epoch`.

    - multiplier: a number, or a function of the epoch.
    - staircase: True changes the rate when an epoch starts. False changes the rate with every
      batch, and passes fractional epochs to `multiplier`.
    - steps_per_epoch: number of batches per epoch, for staircase=False. None uses fit()'s number.
    - momentum_correction: ignored, because Keras 3 compiles the momentum into its step.

    Examples:
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.9**epoch)
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(initial_lr, (int, float)) or initial_lr <= 0:
            raise ValueError(f"initial_lr is {initial_lr!r}: pass a positive learning rate")
        self._initial = float(initial_lr)
        self._multiplier = multiplier if callable(multiplier) else lambda _: float(multiplier)
        self._begin = start_epoch
        self._end = math.inf if end_epoch is None else end_epoch
        self._staircase = staircase
        self._given_steps = self._steps = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras hook. Raises ValueError if the number of batches per epoch is unknown."""
        # Looks again in each fit(), because the number of batches changes with that of the ranks.
        self._steps = self._given_steps or (self.params or {}).get("steps")
        if not self._staircase and not self._steps:
            raise ValueError(
                f"{type(self).__name__} needs steps_per_epoch, the number of batches per epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that sets the rate."""
        self._epoch = epoch
        self._set(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras hook that sets the rate unless `staircase` is True."""
        if not self._staircase and batch:
            self._set(self._epoch + batch / float(self._steps or 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that adds the learning rate to `logs`."""
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        if self._begin <= epoch < self._end:
            write_back(self.model)
            self.model.optimizer.learning_rate = self._initial * self._multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the rate from `initial_lr` / size() to `initial_lr` (Goyal et al., 2017).

    `initial_lr` is the rate for one rank, times size(). The rate grows with every batch during
    `warmup_epochs` epochs.

    Examples:
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=3)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """If `verbose` is 1, rank 0 prints a line when the warm-up is over.

        `momentum_correction` is ignored. `steps_per_epoch` is the number of batches per epoch. None
        uses fit()'s number.
        """

        def multiplier(epoch: float) -> float:
            whole = epoch + 1.0 / float(self._steps or 1)  # includes the present batch
            share = min(whole / warmup_epochs, 1.0)
            return (1.0 + share * (farandole.size() - 1)) / farandole.size()

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self._tell = verbose > 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras hook that prints a line when the warm-up ends."""
        super().on_epoch_end(epoch, logs)
        if self._tell and epoch + 1 == self._end and farandole.rank() == 0:
            print(
                f"epoch {epoch + 1}: the warm-up of the learning rate is over, at {self._initial:g}"
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model on rank 0 whenever `monitor` improves.

    Put MetricAverageCallback before it, so that the metric covers all ranks. The arguments are
    those of keras.callbacks.ModelCheckpoint.

    Examples:
        >>> best = hvd.callbacks.BestModelCheckpoint("best.keras", monitor="val_loss")
    """

    best: Any  # best value of `monitor`, or None

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(filepath, monitor, verbose, True, save_weights_only, mode, save_freq)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if farandole.rank() == 0:
            super()._save_model(epoch, batch, logs)
            return
        value = (logs or {}).get(self.monitor)  # kept, because this rank may become rank 0
        known = value is not None and np.ndim(value) == 0
        if known and (self.best is None or self.monitor_op(value, self.best)):
            self.best = value
