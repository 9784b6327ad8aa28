# SPDX-License-Identifier: Apache-2.0
"""Builds collectives into the graph of tf.function.

The module handles names, execution order and derivatives. collectives.py and exchange.py use it
while TensorFlow traces.

A node occupies a thread of TensorFlow's pool until all ranks run that node. If ranks ran nodes in
different orders, every thread could wait in a node whose peers have no thread left, which would be
a deadlock. Therefore a process runs its nodes one at a time, in program order. All nodes read and
write the same variable, so TensorFlow orders them across nested functions, branches and loops.
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

# Takes eager tensors or a node's arrays, and the call's name. Returns results of the same kind.
Run = Callable[..., Sequence[Any]]
# Maps the gradients of the results to the gradients of the inputs. The second argument is the name
# of the collective that reduces the gradients.
Gradient = Callable[[Sequence[Any], str], Sequence[Any]]
Shapes = Sequence["tuple[int | None, ...] | None"]

_NAMES = 1024  # names that the gradients of unnamed calls use in rotation
_CALLS, _LAST = "_farandole_calls", "_farandole_last"  # attributes of a graph
_token_lock = threading.Lock()


def next_name(op: Op, count: bool = False) -> str:
    """Returns the name of a graph's next unnamed call.

    The name consists of the operation, the function, and the call's number in the function.
    Retracing gives the same names, because each graph counts its own calls. Calls in branches and
    loop bodies count for the function that contains them. If `count` is True, reserves the name.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph") and type(graph).__name__ != "FuncGraph":
        graph = graph.outer_graph  # leave a branch or loop body
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
    """Calls `run` at once, or in a graph node. Returns results whose derivative is `gradient`.

    `shapes` are the results' shapes as far as they are known. `types` are the results' dtypes. If
    `types` is None, results have the inputs' dtypes.
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
    """Executes a node. TensorFlow then owns the results' memory."""
    return list(run([np.asarray(x).view(NodeArray) for x in arrays], name=name))


def _node(
    call: Callable[..., Any], tensors: Sequence[Any], types: Sequence[Any], shapes: Shapes
) -> list[Any]:
    _check_graph()
    graph, token = tf.compat.v1.get_default_graph(), _token()
    last = [x for x in (getattr(graph, _LAST, None),) if x is not None]  # orders gradient nodes
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
    """Adds a node that has no tensors and runs `call` in program order."""
    return _node(lambda: call() and [], [], [], [])[0]


def evaluated_when_run(question: Callable[[], int | None]) -> Any:
    """Returns question()'s answer as an int64 scalar. A traced function asks again in each run.

    Use this for numbers such as hvd.size(), which elastic training may change between runs.
    """

    def ask() -> Any:
        return np.int64(question() or 0)

    if tf.executing_eagerly():
        return ask()
    return tf.ensure_shape(tf.numpy_function(ask, [], tf.int64), ())


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raises farandole's own errors for failed collectives inside tf.function.

    Replaces TensorFlow's OpError with MismatchError, PeerError and so on. Does not change other
    errors.

    Examples:
        >>> with hvd.typed_errors():
        ...     total = tf.function(hvd.allreduce)(tf.ones(2))
    """
    with retyped(tf.errors.OpError):
        yield


@functools.cache
def _new_token() -> Any:
    """Creates the token variable in another thread and as late as possible.

    tf.function would trace twice if the first trace created a variable, even in tf.init_scope. If
    the variable were created at import, users could no longer choose devices.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_variable).result()


def _variable() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="farandole_order")


def _token() -> Any:
    with _token_lock:
        return _new_token()


def _check_graph() -> None:
    """Raises ValueError in graphs where TensorFlow cannot keep the nodes in order."""
    from tensorflow.python.ops import control_flow_util

    graph: Any = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            "XLA can't compile a collective of farandole.tensorflow: leave jit_compile=True out of "
            "tf.function, or pass jit_compile=False to model.compile()"
        )
    while graph is not None:
        if getattr(graph, "name", "").startswith("Dataset_"):  # TensorFlow's prefix
            raise ValueError(
                "a function of tf.data can't call a collective, because each rank's threads "
                "prepare elements in advance: call it on the elements that the dataset yields"
            )
        graph = getattr(graph, "outer_graph", None)
