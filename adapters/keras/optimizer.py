# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: a Keras 3 optimizer that applies the gradients of all ranks, on whatever
backend Keras uses. Users make it; it works inside the functions that Keras compiles."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras

from farandole.calls.arguments import check, check_compression, factors_of, shown
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average


def calls() -> Any:
    """The package of farandole for Keras's backend, farandole.tensorflow for example.

    Raises ImportError for a backend without one.
    """
    return importlib.import_module(f"farandole.{keras.backend.backend()}")


class ReducingOptimizer:
    """What a DistributedOptimizer adds to its class."""

    _farandole: dict[str, Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduces the gradients over all ranks, then applies them as keras.Optimizer does.

        Collective. If gradients are accumulated, only the last of the passes is.
        """
        own: Any = super()
        later = getattr(self, "gradient_accumulation_steps", None)
        return own.apply(grads if later else self._reduced(grads), trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """A hook of Keras, called with what an update uses: here with accumulated gradients."""
        own: Any = super()
        later = getattr(self, "gradient_accumulation_steps", None)
        return own._clip_gradients(self._reduced(grads) if later else grads)

    def _reduced(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks; those that are None must be so on all ranks."""
        hvd, options = calls(), self._farandole
        compression = options["compression"] or hvd.Compression.none
        if keras.backend.backend() == "tensorflow":
            from farandole.tensorflow.gradients import reduce_gradients

            return reduce_gradients(grads, **options | {"compression": compression})
        before, after = options["factors"]
        common = {"op": options["op"], "process_set": options["process_set"]}
        results = list(grads)
        places = [i for i, g in enumerate(results) if g is not None]
        sent = [compression.compress(results[i]) for i in places]
        reduced = hvd.grouped_allreduce(
            [x for x, _ in sent], prescale_factor=before, postscale_factor=after, **common
        )
        for i, x, (_, context) in zip(places, reduced, sent, strict=True):
            results[i] = compression.decompress(x, context)
        return results


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
    """Makes a Keras 3 optimizer reduce gradients over the ranks, and returns it: the same object.

    Its class becomes one of the same name that derives from its own. Its state and its saved form
    stay as they are.

    Arguments:
        optimizer: any of keras.optimizers, before it is used where passes are accumulated.
        compression: Compression.none, fp16 or bf16 of the backend's package, or a class with
            compress and decompress; None: none.
        sparse_as_dense: slices of TensorFlow's embeddings are sent as dense tensors; else those of
            all ranks are gathered, uncompressed.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it; Average
            only.
        op: Average, Sum, Min, Max, Product or Adasum of the ranks' gradients.
        backward_passes_per_step: so many batches make a step, by Keras's
            gradient_accumulation_steps; gradients are reduced in the last of them.
        average_aggregated_gradients: whether these batches' gradients are averaged, not summed.
        process_set: the ranks that reduce.

    farandole accepts name, device_dense, device_sparse, num_groups, groups and
    scale_local_gradients for compatibility with Horovod and ignores them: it reduces all gradients
    as one group.

    Raises ValueError and TypeError for wrong options, ImportError for a backend without adapter.

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
    if isinstance(optimizer, ReducingOptimizer):
        raise ValueError("optimizer is distributed already: wrap it once")
    _check_scaling(optimizer)
    calls()
    if backward_passes_per_step > 1:
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise ValueError(
                "backward_passes_per_step needs a new optimizer that does not set "
                "gradient_accumulation_steps itself"
            )
        optimizer.gradient_accumulation_steps = backward_passes_per_step
        after *= 1.0 if average_aggregated_gradients else backward_passes_per_step
    kind = type(optimizer)
    made = type(kind.__name__, (ReducingOptimizer, kind), {"__module__": kind.__module__})
    object.__setattr__(optimizer, "__class__", made)
    object.__setattr__(
        optimizer,
        "_farandole",
        {
            "op": op,
            "factors": (before, after),
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set,
        },
    )
    return optimizer


def _check_scaling(optimizer: Any) -> None:
    """Refuses what would let each rank decide alone whether it skips a step."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not scaled and keras.config.dtype_policy().compute_dtype == "float16":
        raise ValueError(
            "the dtype policy computes in float16, so Keras would scale the loss outside of this "
            "optimizer, and each rank would skip steps alone: pass "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
        )


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, **options: Any
) -> Any:
    """keras.saving.load_model, whose model's optimizer is a DistributedOptimizer again.

    Arguments:
        filepath: as there.
        custom_optimizers: a list of optimizer classes that the file may name.
        custom_objects: as there.
        options: those of DistributedOptimizer, such as compression.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        >>> model.save("model.keras")
        >>> hvd.load_model("model.keras").optimizer is not None
        True
    """
    named = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=named)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, **options)
    return model
