# SPDX-License-Identifier: Apache-2.0
"""Computes numbers of rows per member as tensors, because a graph knows them only when it runs.

Backward passes use it. farandole.calls.rows does the same with Python numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def table_like(result: Any, rows: Any, dtype: Any = np.int64) -> Any:
    """Converts numbers of rows to a node's array or an eager tensor, depending on `result`.

    Raises ValueError if `dtype` cannot hold the numbers.
    """
    table = np.asarray(rows)
    if len(table) and table.max() > np.iinfo(dtype).max:
        raise ValueError(
            f"{table.max()} rows came from one member, but TensorFlow gets numbers of rows as "
            f"{np.dtype(dtype)}: send at most {np.iinfo(dtype).max} rows to a rank in one call"
        )
    table = table.astype(dtype, copy=False)
    return table if isinstance(result, np.ndarray) else tf.constant(table)


def kept(rows: Any, members: Any) -> Any:
    """Returns the number of rows that a reducescatter gives to each member."""
    return rows // members + tf.cast(tf.range(members) < rows % members, tf.int64)


def parts(splits: Sequence[Any] | None, rows: Any, members: Any) -> Any:
    """Returns the number of rows for each member: `splits`, or equal parts if it is None."""
    return tf.fill([members], rows // members) if splits is None else tf.cast(splits, tf.int64)


def scatter_returned(rows: Any, received: Any, sent: Any, like: Any) -> Any:
    """Returns the gradient of `like`, a tensor whose rows were sent to other ranks.

    `rows` came back from those ranks. Per member, `sent` counts the rows of the forward pass, and
    `received` counts the rows that came back. Rows that did not come back get zeros.
    """
    if tf.executing_eagerly() and rows.shape[0] == like.shape[0]:
        return rows
    at = tf.where(tf.repeat(tf.not_equal(received, 0), sent))
    return tf.scatter_nd(at, rows, tf.shape(like, tf.int64))
