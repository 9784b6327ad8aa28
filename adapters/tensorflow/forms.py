# SPDX-License-Identifier: Apache-2.0
"""What all collectives on tensors have in common: their decorator, the form for one tensor, shapes
of results. Used by collectives.py and exchange.py when they are imported, and by their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import tensorflow as tf

from farandole.calls.forms import OneTensor, one_of
from farandole.calls.public_call import collective_then
from farandole.calls.requests import Call, Op
from farandole.members import denoted, global_process_set
from farandole.tensorflow.graph import Shapes, next_name

P = ParamSpec("P")
R = TypeVar("R")


def public(op: Op) -> Callable[[Callable[P, Callable[[], R]]], Callable[P, R]]:
    """Decorates a public call, whose code AutoGraph leaves as it is."""

    def calls(given: dict[str, Any]) -> list[Call]:
        """Those in which the peers of one with a wrong argument may wait."""
        name = given.get("name")
        if not isinstance(name, str):
            name = None if tf.executing_eagerly() else next_name(op, count=True)
        where = denoted(given.get("process_set", global_process_set))
        return [Call(op, name, number) for number in where]

    def decorate(prepare: Callable[P, Callable[[], R]]) -> Callable[P, R]:
        checked = collective_then(op, calls=calls)(prepare)
        made: Callable[P, R] = tf.autograph.experimental.do_not_convert(checked)
        return made

    return decorate


def one(grouped: Callable[Concatenate[Sequence[Any], P], list[R]]) -> OneTensor[Any, P, R]:
    """The form for one tensor of a `grouped_` call."""
    made: OneTensor[Any, P, R] = tf.autograph.experimental.do_not_convert(one_of(grouped))
    return made


def tensors_of(values: Iterable[Any]) -> list[Any]:
    """The values as tensors; variables by their values.

    Raises TypeError for what is not dense, such as a tf.RaggedTensor.
    """
    return [_tensor_of(x) for x in values]


def _tensor_of(value: Any) -> Any:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as reason:
        raise TypeError(
            f"a {type(value).__name__} can't become a dense tensor: pass a tf.Tensor, for example "
            f"each part of a tf.RaggedTensor as one ({reason})"
        ) from reason


def same_shapes(tensors: Sequence[Any]) -> Shapes:
    """Results as the inputs."""
    return [x.shape for x in tensors]


def any_rows(tensors: Sequence[Any]) -> Shapes:
    """Results with rows of other ranks."""
    return [None if x.shape.rank is None else (None, *x.shape[1:]) for x in tensors]
