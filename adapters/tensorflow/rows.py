# SPDX-License-Identifier: Apache-2.0
"""Rows by member of a process set, as tensors: farandole.calls.rows for graphs, where numbers are
known only when a function runs. Used by backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def table_like(result: Any, rows: Any, dtype: Any = np.int64) -> Any:
    """A table that is returned with a result, of a node or an eager one. Raises ValueError for
    numbers that `dtype` cannot hold."""
    table = np.asarray(rows)
    if len(table) and table.max() > np.iinfo(dtype).max:
        raise ValueError(
            f"{table.max()} rows came from one member, and TensorFlow gets these numbers as "
            f"{np.dtype(dtype)}: send at most {np.iinfo(dtype).max} rows to a rank in one call"
        )
    table = table.astype(dtype, copy=False)
    return table if isinstance(result, np.ndarray) else tf.constant(table)


def kept(rows: Any, members: Any) -> Any:
    """The rows that a reducescatter gives each member."""
    return rows // members + tf.cast(tf.range(members) < rows % members, tf.int64)


def parts(splits: Sequence[Any] | None, rows: Any, members: Any) -> Any:
    """The rows for each member: `splits`, or equal parts without them."""
    return tf.fill([members], rows // members) if splits is None else tf.cast(splits, tf.int64)


def placed(rows: Any, came: Any, sent: Any, like: Any) -> Any:
    """The gradient of a tensor like `like` from its `rows` that came back, `came` by member, of
    those that were `sent`. Others are zeros: they went nowhere, or to a member that has joined."""
    if tf.executing_eagerly() and rows.shape[0] == like.shape[0]:
        return rows
    at = tf.where(tf.repeat(tf.not_equal(came, 0), sent))
    return tf.scatter_nd(at, rows, tf.shape(like, tf.int64))
