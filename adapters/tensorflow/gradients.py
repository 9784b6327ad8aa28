# SPDX-License-Identifier: Apache-2.0
"""Reduces gradients over the ranks, eagerly and inside tf.function.

Users call DistributedGradientTape(), and farandole.keras calls reduce_gradients().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole.calls.arguments import check_compression, factors_of
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average
from farandole.tensorflow.collectives import grouped_allreduce
from farandole.tensorflow.compression import Compression


def reduce_gradients(
    gradients: Sequence[Any],
    op: int = Average,
    factors: tuple[float, float] = (1.0, 1.0),
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces dense gradients by one grouped allreduce, and sparse slices by one allgather.

    If a gradient is None on one rank, it must be None on all ranks. Its result is then also None.
    """
    results = list(gradients)
    if sparse_as_dense:
        results = [None if g is None else tf.convert_to_tensor(g) for g in results]
    places = [i for i, g in enumerate(results) if g is not None]
    reduced = grouped_allreduce(
        [results[i] for i in places],
        compression=compression,
        op=op,
        prescale_factor=factors[0],
        postscale_factor=factors[1],
        process_set=process_set,
    )
    for i, g in zip(places, reduced, strict=True):
        results[i] = g
    return results


class DistributedTapeMixin:
    """Mixin that a DistributedGradientTape adds to tf.GradientTape."""

    _options: dict[str, Any]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Computes tf.GradientTape's gradients and reduces them over all ranks.

        This is a collective.
        """
        inner: Any = super()
        own = inner.gradient(target, sources, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(
            own, reduce_gradients(tf.nest.flatten(own), **self._options)
        )


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a tf.GradientTape's gradient() reduce over the ranks. Returns the same tape.

    - gradtape: the tape, before or after it has recorded.
    - compression: Compression.none, fp16 or bf16, or a class with compress and decompress.
    - sparse_as_dense: True sends tf.IndexedSlices as dense tensors. False gathers the slices of all
      ranks, uncompressed, and works with Average and Sum only.
    - op: Average, Sum, Min, Max, Product or Adasum of the ranks' gradients.
    - gradient_predivide_factor: a factor f divides gradients by f before the sum, and by size / f
      after the sum. Works with Average only.
    - process_set: the ranks that reduce.

    device_dense, device_sparse, num_groups, groups and scale_local_gradients exist for
    compatibility with Horovod. farandole ignores them and reduces all gradients as one group.

    Raises ValueError and TypeError for wrong options.

    Examples:
        >>> x = tf.Variable([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(x * x)
        >>> hvd.DistributedGradientTape(tape).gradient(loss, x).numpy()
        array([2., 4.], dtype=float32)
    """
    factors = factors_of(op, gradient_predivide_factor, process_set)
    check_compression(compression)
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape is a {type(gradtape).__name__}: pass a tf.GradientTape")
    gradtape._options = {
        "op": op,
        "factors": factors,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    if not isinstance(gradtape, DistributedTapeMixin):
        kind = type(gradtape)
        gradtape.__class__ = type(kind.__name__, (DistributedTapeMixin, kind), {})
    return gradtape
