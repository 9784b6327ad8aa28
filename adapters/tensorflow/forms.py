# SPDX-License-Identifier: Apache-2.0
"""Code that collectives.py and exchange.py share: a decorator, input conversion, result shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from farandole.calls.public_call import collective
from farandole.calls.requests import Call, Op
from farandole.members import denoted, global_process_set
from farandole.tensorflow.graph import Shapes, next_name

F = TypeVar("F", bound=Callable[..., Any])


def public(op: Op) -> Callable[[F], F]:
    """Decorates a public call of the operation `op`. AutoGraph does not convert the call's code."""

    def calls(given: dict[str, Any]) -> list[Call]:
        """Lists the calls to be refused after a wrong argument, because peers may wait in them."""
        name = given.get("name")
        if not isinstance(name, str):
            name = None if tf.executing_eagerly() else next_name(op, count=True)
        where = denoted(given.get("process_set", global_process_set))
        return [Call(op, name, number) for number in where]

    def decorate(function: F) -> F:
        made: F = tf.autograph.experimental.do_not_convert(collective(op, calls=calls)(function))
        return made

    return decorate


def tensors_of(values: Iterable[Any]) -> list[Any]:
    """Converts values, which may be variables, to tensors.

    Raises TypeError for values that are not dense, such as a tf.RaggedTensor.
    """
    return [_tensor_of(x) for x in values]


def _tensor_of(value: Any) -> Any:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as reason:
        raise TypeError(
            f"a {type(value).__name__} can't become a dense tensor: pass a tf.Tensor; send each "
            f"part of a tf.RaggedTensor separately ({reason})"
        ) from reason


def same_shapes(tensors: Sequence[Any]) -> Shapes:
    """Returns the results' shapes for an operation that keeps the inputs' shapes."""
    return [x.shape for x in tensors]


def any_rows(tensors: Sequence[Any]) -> Shapes:
    """Returns the results' shapes for an operation that changes the numbers of rows."""
    return [None if x.shape.rank is None else (None, *x.shape[1:]) for x in tensors]
