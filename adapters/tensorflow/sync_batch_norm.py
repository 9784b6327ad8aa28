# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over all ranks' batches, as a Keras layer for the TensorFlow backend.

The layer makes one differentiable allreduce, or two in float64.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from farandole.members import ProcessSet, global_process_set, registered
from farandole.ops import Sum
from farandole.tensorflow.collectives import allreduce


@keras.saving.register_keras_serializable("farandole")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """keras.layers.BatchNormalization with the statistics of all ranks' batches together.

    Batches may differ in length between ranks. All ranks must use their layers in the same order.
    Takes the arguments of BatchNormalization, and `process_set`, the ranks to include.

    Examples:
        >>> hvd.SyncBatchNormalization()(tf.ones((4, 3)), training=True).shape
        TensorShape([4, 3])
    """

    def __init__(
        self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.supports_jit = False
        self._farandole_set = process_set

    def get_config(self) -> dict[str, Any]:
        """Keras hook that returns the arguments, with the ranks of `process_set`."""
        world = self._farandole_set.process_set_id == 0
        ranks = None if world else self._farandole_set.ranks
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Keras hook that creates a layer. Raises ValueError if no process set has its ranks."""
        ranks = config.get("process_set")
        sets = [x for x in registered if x.ranks == ranks] if ranks else [global_process_set]
        if not sets:
            raise ValueError(
                f"{config.get('name')}: its process set has ranks {ranks}: add that set first"
            )
        return super().from_config({**config, "process_set": sets[0]})

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        x = tf.convert_to_tensor(inputs)
        wide, axes = tf.cast(x, tf.float64), list(self._reduction_axes)
        counted = tf.ones_like(wide)
        if mask is not None:
            counted *= tf.cast(tf.expand_dims(mask, -1), tf.float64)

        def over_ranks(*values: Any) -> list[Any]:
            """Returns the means of these values over the elements of all ranks."""
            parts = [counted, *(tf.where(counted > 0, value, 0.0) for value in values)]
            own = tf.stack([tf.reduce_sum(part, axes, keepdims=True) for part in parts])
            count, *sums = tf.unstack(allreduce(own, op=Sum, process_set=self._farandole_set))
            return [value / tf.maximum(count, 1.0) for value in sums]

        centre = tf.zeros([], tf.float64)
        if x.dtype == tf.float64:  # if the mean is large, sums of squares lose a small variance
            (centre,) = over_ranks(wide)
        mean, squares = over_ranks(wide - centre, tf.square(wide - centre))
        variance = tf.maximum(squares - mean * mean, 0.0)
        return tuple(tf.cast(tf.squeeze(y, axes), x.dtype) for y in (mean + centre, variance))
