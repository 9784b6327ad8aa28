# SPDX-License-Identifier: Apache-2.0
"""Elastic training with TensorFlow: states that hold variables, under Horovod's names.

Use it on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from farandole import elastic
from farandole.elastic import ObjectState, State
from farandole.keras.elastic import KerasState as TensorFlowKerasState
from farandole.keras.elastic import VariablesState
from farandole.tensorflow.graph import typed_errors

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

R = TypeVar("R")
P = ParamSpec("P")
S = TypeVar("S", bound=State)


class TensorFlowState(VariablesState):
    """State of TensorFlow variables and attributes: TensorFlowState(variables, step=0).

    `session` is ignored, but accepted for compatibility with Horovod.

    Examples:
        >>> state = hvd.elastic.TensorFlowState([tf.Variable([1.0, 2.0])], step=0)
    """

    def __init__(self, variables: Sequence[Any], session: Any = None, **attributes: Any) -> None:
        super().__init__(variables, **attributes)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a training function whose first argument is a state, like farandole.elastic.run.

    A TensorFlow error may show that a rank is lost, just as farandole's errors do.

    Examples:
        >>> hvd.elastic.run(lambda state: state.step)(hvd.elastic.ObjectState(step=3))
        3
    """
    return elastic.run(typed_errors()(func))
