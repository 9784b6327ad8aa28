# SPDX-License-Identifier: Apache-2.0
"""How a collective becomes a node of tf.function's graph: its name, its place in the order, its
derivative. Used by every call of collectives.py, while TensorFlow traces.

A node waits until all ranks have come, and holds a thread of TensorFlow's pool meanwhile. So nodes
of one process run one after the other, in the order of the program: each reads and writes one
variable, by which TensorFlow orders them across nested functions, branches and loops. Otherwise
ranks could wait in different nodes, without a thread left for those that the others wait for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from farandole.calls.requests import Op, count_unnamed
from farandole.errors import retyped
from farandole.members import ProcessSet, set_id
from farandole.tensorflow.kind import NodeArray

# (arrays: eager tensors, or those of a node; name=the call's) -> results of the same kind.
Run = Callable[..., Sequence[Any]]
# (results' gradients, the name of their collective) -> the inputs' gradients.
Gradient = Callable[[Sequence[Any], str], Sequence[Any]]
Shapes = Sequence["tuple[int | None, ...] | None"]

_NAMES = 1024  # unnamed calls whose gradients may be under way at once
_CALLS, _LAST = "_farandole_calls", "_farandole_last"  # attributes of a graph
_making = threading.Lock()


def next_name(op: Op, count: bool = False) -> str:
    """The name of the next unnamed call of a graph: operation, function, place in the function.

    Retracing gives the same names: each graph counts for itself, and branches and bodies of loops
    count with the function that they are in. `count`: the call takes it.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph") and type(graph).__name__ != "FuncGraph":
        graph = graph.outer_graph  # out of a branch, or the body of a loop
    place = getattr(graph, _CALLS, 0)
    if count:
        setattr(graph, _CALLS, place + 1)
    return f"{op.name.lower()}.{getattr(graph, 'name', 'graph')}.{place}"


def differentiable(
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    tensors: Sequence[Any],
    run: Run,
    gradient: Gradient,
    shapes: Shapes,
    types: Sequence[Any] | None = None,
) -> list[Any]:
    """The results of `run`, at once or by a node, with `gradient` as derivative.

    `shapes`, `types`: those of the results as far as they are known; types None: the inputs'.
    """
    if not tensors:
        return []
    inside = not tf.executing_eagerly()
    if inside and name is None:
        name = next_name(op, count=True)
    place = count_unnamed(set_id(process_set)) % _NAMES if name is None else 0
    back = f"{op.name.lower()}.gradient.{place}" if name is None else f"{name}.gradient"
    types = [x.dtype for x in tensors] if types is None else types
    named = functools.partial(_run, run, name)

    def forward(*xs: Any) -> tuple[list[Any], Callable[..., Any]]:
        results = _node(named, xs, types, shapes) if inside else list(run(xs, name=name))

        def derivative(*gs: Any) -> list[Any]:
            pairs = zip(gs, results, strict=True)
            dense = [tf.zeros_like(y) if g is None else tf.convert_to_tensor(g) for g, y in pairs]
            return list(gradient(dense, back))

        return results, derivative

    if any(x.dtype.is_floating or x.dtype.is_complex for x in tensors):
        return list(tf.custom_gradient(forward)(*tensors))
    return forward(*tensors)[0]


def _run(run: Run, name: str | None, *arrays: Any) -> list[Any]:
    """What a node does: TensorFlow takes over the results' memory."""
    return list(run([np.asarray(x).view(NodeArray) for x in arrays], name=name))


def _node(
    call: Callable[..., Any], tensors: Sequence[Any], types: Sequence[Any], shapes: Shapes
) -> list[Any]:
    """A node that runs `call`, after those that were made before it."""
    _check_place()
    graph, token = tf.compat.v1.get_default_graph(), _token()
    last = [x for x in (getattr(graph, _LAST, None),) if x is not None]  # gradients need this
    with tf.control_dependencies(last):
        before = token.read_value()
    with tf.control_dependencies([before]):
        results = tf.numpy_function(call, list(tensors), list(types))
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    node = results[0] if isinstance(results[0], tf.Operation) else results[0].op
    setattr(graph, _LAST, node)
    with tf.control_dependencies([node]):
        token.assign(before)
    for result, shape in zip(results, shapes, strict=False):
        result.set_shape(shape)
    return results


def barrier_node(call: Callable[[], object]) -> Any:
    """A node without tensors that runs `call` in its turn."""
    return _node(lambda: call() and [], [], [], [])[0]


def asked_when_run(question: Callable[[], int | None]) -> Any:
    """A number of the ranks, such as hvd.size, that may be another one when a function runs again:
    an int64 scalar."""

    def ask() -> Any:
        return np.int64(question() or 0)

    if tf.executing_eagerly():
        return ask()
    return tf.ensure_shape(tf.numpy_function(ask, [], tf.int64), ())


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Within it, what a collective inside tf.function fails with is raised as farandole's error.

    Raises MismatchError, PeerError and their kind, from TensorFlow's OpError; others pass.

    Examples:
        >>> with hvd.typed_errors():
        ...     total = tf.function(hvd.allreduce)(tf.ones(2))
    """
    with retyped(tf.errors.OpError):
        yield


@functools.cache
def _made_token() -> Any:
    """Another thread makes it: tf.function traces its function twice if the first trace makes a
    variable, in tf.init_scope too. An earlier moment would keep users from choosing devices."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_variable).result()


def _variable() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="farandole_order")


def _token() -> Any:
    """The variable that all nodes read and write."""
    with _making:
        return _made_token()


def _check_place() -> None:
    """Raises ValueError where TensorFlow could not keep the order of the nodes."""
    from tensorflow.python.ops import control_flow_util

    graph: Any = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            "XLA can't compile a collective of farandole.tensorflow: leave jit_compile=True out of "
            "tf.function, or pass jit_compile=False to model.compile()"
        )
    while graph is not None:
        if getattr(graph, "name", "").startswith("Dataset_"):  # as TensorFlow calls them
            raise ValueError(
                "a function of tf.data can't call a collective, because threads prepare each "
                "rank's elements ahead: call it on what the dataset yields"
            )
        graph = getattr(graph, "outer_graph", None)
