# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer for Keras 3, which reduces gradients over the ranks on any backend.

It also works inside functions that Keras compiles.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import keras
from keras.src import api_export

from farandole.calls.arguments import check, check_compression, factors_of, shown
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average
from farandole.start.agent_client import may_grow
from farandole.topology import is_initialized, size


def calls() -> Any:
    """Returns the farandole package for Keras's backend, such as farandole.tensorflow.

    Raises ImportError for a backend that has no such package.
    """
    return importlib.import_module(f"farandole.{keras.backend.backend()}")


class ReductionSettings(NamedTuple):
    """Settings of a DistributedOptimizer's reduction."""

    op: int
    factors: tuple[float, float]
    compression: Any
    sparse_as_dense: bool
    process_set: ProcessSet
    wraps: bool  # True if it contains optimizers; then only they may accumulate gradients

    def of(self, grads: Sequence[Any]) -> list[Any]:
        """Reduces the gradients over the ranks.

        If a gradient is None on one rank, it must be None on all ranks.
        """
        hvd = calls()
        compression = self.compression or hvd.Compression.none
        common: dict[str, Any] = {"op": self.op, "process_set": self.process_set}
        if keras.backend.backend() == "tensorflow":
            from farandole.tensorflow.gradients import reduce_gradients

            common |= {"factors": self.factors, "compression": compression}
            return reduce_gradients(grads, sparse_as_dense=self.sparse_as_dense, **common)
        before, after = self.factors
        results = list(grads)
        places = [i for i, g in enumerate(results) if g is not None]
        sent = [compression.compress(results[i]) for i in places]
        reduced = hvd.grouped_allreduce(
            [x for x, _ in sent], prescale_factor=before, postscale_factor=after, **common
        )
        for i, x, (_, context) in zip(places, reduced, sent, strict=True):
            results[i] = compression.decompress(x, context)
        return results


class Step(Enum):
    """Says when the gradients of the current step are reduced."""

    REDUCED = auto()  # reduced when the step started
    ACCUMULATED = auto()  # reduced in the last of several passes, by _clip_gradients()


_current_step: ContextVar[Step | None] = ContextVar("farandole.keras.step", default=None)


class DistributedOptimizerMixin:
    """Mixin that a DistributedOptimizer adds to an optimizer's class.

    The outermost method of a step reduces the gradients. Methods that this method calls, here or in
    contained optimizers, do not reduce the gradients again. An object without settings is a copy.
    If there are other ranks, a copy's steps raise RuntimeError.
    """

    _farandole: ReductionSettings | None = None
    _farandole_used = False  # True once a step has started or was traced

    def build(self, variables: Any) -> None:
        """Keras hook that is called before the first step."""
        self._check_scaled_inside()
        own: Any = super()
        own.build(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduces the gradients over all ranks, then applies them as keras.Optimizer does.

        This is a collective, unless this pass only accumulates gradients.
        """
        own: Any = super()
        with self._step(grads) as reduced:
            return own.apply(reduced, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Does the same as apply(), for JAX, where a LossScaleOptimizer does not call apply()."""
        own: Any = super()
        with self._step(grads) as reduced:
            return own.stateless_apply(optimizer_variables, reduced, trainable_variables)

    @contextmanager
    def _step(self, grads: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Starts a step unless one is under way. Yields the gradients to apply."""
        if _current_step.get() is not None:
            yield grads
            return
        reduction = self._reduction()
        if not self._farandole_used:
            self._check_scaled_inside()
            object.__setattr__(self, "_farandole_used", True)
        later = reduction is not None and not reduction.wraps
        later = later and bool(getattr(self, "gradient_accumulation_steps", None))
        before = _current_step.set(Step.ACCUMULATED if later else Step.REDUCED)
        try:
            yield grads if later or reduction is None else reduction.of(grads)
        finally:
            _current_step.reset(before)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Keras hook before an update. Reduces the gradients if the step has accumulated them."""
        own: Any = super()
        reduction = self._farandole if _current_step.get() is Step.ACCUMULATED else None
        return own._clip_gradients(reduction.of(grads) if reduction else grads)

    def _backend_update_step(self, *args: Any) -> Any:
        self._check_step()
        own: Any = super()
        return own._backend_update_step(*args)

    def update_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keras hook within a step. Raises RuntimeError if called outside a step."""
        self._check_step()
        own: Any = super()
        return own.update_step(*args, **kwargs)

    def _check_step(self) -> None:
        if _current_step.get() is None and self._reduction() and _has_others():
            raise RuntimeError(
                f"a step of this {type(self).__name__}, a DistributedOptimizer, did not start with "
                "apply() and would use this rank's gradients alone: call apply(), or pass the "
                "optimizer that contains it to DistributedOptimizer()"
            )

    def _reduction(self) -> ReductionSettings | None:
        """Returns the settings, or None if this is a copy.

        Raises RuntimeError if this is a copy and there are other ranks.
        """
        if self._farandole is None and _has_others():
            raise RuntimeError(
                f"this {type(self).__name__} is a DistributedOptimizer that was copied, or loaded "
                "from a file, and would train on this rank's gradients alone: on all ranks call "
                "hvd.DistributedOptimizer(model.optimizer) before fit(), or hvd.load_model()"
            )
        return self._farandole

    def _check_scaled_inside(self) -> None:
        """Raises ValueError if a plain LossScaleOptimizer is among the callers.

        Such an optimizer would look only at this rank's gradients to decide whether to skip a step.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _current_step.get() is None:
            caller = type(frame.f_locals.get("self"))
            if issubclass(caller, _SCALER) and not issubclass(caller, DistributedOptimizerMixin):
                raise ValueError(
                    "a LossScaleOptimizer around a DistributedOptimizer would let each rank decide "
                    "alone whether it skips a step: pass "
                    "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
                )
            frame = frame.f_back

    def __reduce__(self) -> Any:
        """Makes pickles and copies keep the mixin but lose the settings."""
        own: Any = super()
        _, (saved,) = own.__reduce__()
        return _unpickled, (_plain(type(self)), saved)


_SCALER = keras.optimizers.LossScaleOptimizer


def _has_others() -> bool:
    """Returns True if there are other ranks, or if other ranks may join later.

    If ranks may join later, a function that Keras traces now may run together with them.
    """
    return is_initialized() and (size() > 1 or may_grow())


def _unpickled(plain: Any, saved: Any) -> Any:
    with keras.saving.custom_object_scope({plain.__name__: reducing(plain)}):
        return keras.Optimizer._unpickle_model(saved)


def _plain(kind: Any) -> Any:
    return kind.__bases__[1] if DistributedOptimizerMixin in kind.__bases__ else kind


@cache
def reducing(plain: Any) -> Any:
    """Returns the class that combines the mixin with the optimizer class `plain`.

    Keras saves the class under the name of `plain`. Without farandole, Keras therefore loads
    `plain` from a file. With farandole, Keras loads this class, which refuses to train alone.
    """
    builtin = next((c for c in plain.__mro__ if api_export.get_name_from_symbol(c)), plain)
    if plain.__name__ != builtin.__name__ or not plain.__module__.startswith("keras."):
        builtin = plain  # a class that the user has defined
    made = type(
        plain.__name__, (DistributedOptimizerMixin, plain), {"__module__": builtin.__module__}
    )
    if plain is not builtin or api_export.get_name_from_symbol(plain):
        path = f"{builtin.__module__}.{builtin.__name__}"
        api_export.register_internal_serializable(path, made)
    return made


def _register_all() -> None:
    kinds: Any = [x for x in vars(keras.optimizers).values() if isinstance(x, type)]
    for kind in kinds:
        if issubclass(kind, keras.Optimizer):
            own: Any = type(kind.__new__(kind))  # on torch, Keras substitutes a different class
            reducing(own)


_register_all()


def inside(optimizer: Any) -> list[Any]:
    """Returns the optimizers that the attributes of `optimizer` contain."""
    values: list[Any] = []
    for x in vars(optimizer).values():
        if isinstance(x, Mapping):  # such as keras.optimizers.OptimizerMap
            values += [*x.values(), getattr(x, "default_optimizer", None)]
        else:
            values += x if isinstance(x, (list, tuple)) else [x]
    found = {id(x): x for x in values if isinstance(x, keras.Optimizer) and x is not optimizer}
    return list(found.values())


def unreduced_optimizers(optimizer: Any) -> list[str]:
    """Returns class names of the optimizers whose gradients were not reduced.

    Looks at `optimizer` and at the optimizers that it contains.
    """
    if isinstance(optimizer, DistributedOptimizerMixin) and optimizer._farandole_used:
        return []
    parts = [x for x in inside(optimizer) if x.built]
    names = [name for x in parts for name in unreduced_optimizers(x)]
    return names if parts else [type(optimizer).__name__]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras 3 optimizer reduce gradients over the ranks. Returns the same object.

    The optimizer's class becomes a subclass of the same name. The optimizer's state and saved form
    do not change.

    - optimizer: a keras.optimizers optimizer. If backward_passes_per_step is above 1, it must not
      be built yet.
    - compression: Compression.none, fp16 or bf16 of the backend's package, or a class with compress
      and decompress. None sends gradients unchanged.
    - sparse_as_dense: True sends TensorFlow's embedding slices as dense tensors. False gathers the
      slices of all ranks, uncompressed.
    - gradient_predivide_factor: a factor f divides gradients by f before the sum, and by size / f
      after the sum. Works with Average only.
    - op: Average, Sum, Min, Max, Product or Adasum of the ranks' gradients.
    - backward_passes_per_step: number of batches per step. Keras's gradient_accumulation_steps
      accumulates the batches' gradients, and the ranks reduce them with the last batch.
    - average_aggregated_gradients: True averages these batches' gradients, False adds them.
    - process_set: the ranks that reduce.

    name, device_dense, device_sparse, num_groups, groups and scale_local_gradients exist for
    compatibility with Horovod. farandole ignores them and reduces all gradients as one group.

    Raises ValueError and TypeError for wrong options, and ImportError if the backend has no
    adapter.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        >>> type(optimizer).__name__
        'SGD'
    """
    before, after = factors_of(op, gradient_predivide_factor, process_set)
    check(backward_passes_per_step=backward_passes_per_step)
    if compression is not None:
        check_compression(compression)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is {shown(optimizer)}: pass a keras.optimizers.Optimizer")
    if any(getattr(x, "_farandole", None) for x in [optimizer, *inside(optimizer)]):
        raise ValueError("optimizer is distributed already: wrap it once")
    _check_scaling(optimizer)
    calls()
    wraps = isinstance(optimizer, (_SCALER, keras.optimizers.MultiOptimizer))
    wraps = wraps or bool(inside(optimizer))
    if backward_passes_per_step > 1:
        if wraps:
            raise ValueError(
                "backward_passes_per_step does not reach the optimizer inside "
                f"{type(optimizer).__name__}: pass gradient_accumulation_steps to that one"
            )
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise ValueError(
                "backward_passes_per_step needs a new optimizer that does not set "
                "gradient_accumulation_steps itself"
            )
        optimizer.gradient_accumulation_steps = backward_passes_per_step
        after *= 1.0 if average_aggregated_gradients else backward_passes_per_step
    reduction = ReductionSettings(
        op, (before, after), compression, sparse_as_dense, process_set, wraps
    )
    object.__setattr__(optimizer, "__class__", reducing(_plain(type(optimizer))))
    object.__setattr__(optimizer, "_farandole", reduction)
    return optimizer


def _check_scaling(optimizer: Any) -> None:
    """Raises ValueError if loss scaling would let each rank decide alone to skip a step."""
    scaled = isinstance(optimizer, _SCALER)
    if not scaled and keras.config.dtype_policy().compute_dtype == "float16":
        raise ValueError(
            "the dtype policy computes in float16, so Keras would scale the loss outside of this "
            "optimizer, and each rank would skip steps alone: pass "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
        )


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, **options: Any
) -> Any:
    """Calls keras.saving.load_model and makes the model's optimizer a DistributedOptimizer again.

    - filepath, custom_objects: arguments of keras.saving.load_model.
    - custom_optimizers: optimizer classes that the file may name.
    - options: options of DistributedOptimizer, such as compression.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        >>> model.save("model.keras")
        >>> hvd.load_model("model.keras").optimizer is not None
        True
    """
    named = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=named)
    if getattr(model, "optimizer", None) is not None:  # the model was compiled
        DistributedOptimizer(model.optimizer, **options)
    return model
