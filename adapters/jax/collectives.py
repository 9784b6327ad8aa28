# SPDX-License-Identifier: Apache-2.0
"""Collectives on JAX arrays, outside and within jit. They may be called from any thread.

A call takes an array or a pytree, sends it as one group and returns a pytree of new arrays. If the
values are on a CPU, the core runs the call at once. If the values are on a GPU, a small JAX program
runs the call. While JAX traces, the call becomes an instruction of the traced program, see
program.py.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, TypeVar

import jax
from jax import numpy as jnp

from farandole import ops
from farandole.calls.arguments import shown
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Call, Op
from farandole.jax import kind as _kind  # noqa: F401 (registers JAX's arrays)
from farandole.jax.program import RULES, UNNAMED, bind, placement_of, results_of, run_alone
from farandole.members import ProcessSet, denoted, global_process_set, set_id
from farandole.ops.starts import Adasum, reduction

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

Tree = TypeVar("Tree")
Meet = Callable[[], Tree]


def traced(tree: Any) -> bool:
    """Returns True if JAX is tracing a leaf of the tree. A traced leaf has no value."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _on_gpu(tree: Any) -> bool:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(device.platform != "cpu" for x in arrays for device in x.sharding.device_set)


def _in_program(tree: Any) -> bool:
    return traced(tree) or _on_gpu(tree)


def _calls(op: Op) -> Callable[[dict[str, Any]], list[Call]]:
    """Lists the calls that must be refused after a wrong argument, as peers may wait in them."""

    def calls(given: dict[str, Any]) -> list[Call]:
        name, tree = given.get("name"), given.get("tree", given.get("tensor"))
        if not isinstance(name, str):
            name = UNNAMED if _in_program(tree) else None
        where = denoted(given.get("process_set", global_process_set))
        return [Call(op, name, number) for number in where]

    return calls


def _meeting(call: Call, tree: Tree, process_set: ProcessSet, timeout: float | None) -> Meet[Tree]:
    """Returns a function that makes the call.

    The function makes the call in the core if the values are on a CPU, else in a JAX program.
    """
    leaves, form = jax.tree.flatten(tree)
    arrays = list(map(jnp.asarray, leaves))  # within jit, this makes numbers traced as well
    if not _in_program(arrays):
        common: Any = {"name": call.name, "process_set": process_set, "timeout": timeout}
        now = RULES[call.op].now
        return lambda: jax.tree.unflatten(form, now(arrays, call, common)) if arrays else tree
    if timeout is not None:
        raise ValueError(
            f"timeout is {shown(timeout)}, but within jit or on a GPU a program could not resume "
            "the wait: leave timeout out; FARANDOLE_STALL_ABORT limits all waits"
        )
    if call.reduce_op == Adasum:
        raise ValueError("op is Adasum, which works outside of jit and on CPUs only")
    place = placement_of(process_set)
    if call.root >= 0 and call.root not in place.members:
        raise ValueError(f"root_rank is {call.root}: pass a member of the process set")
    results_of(list(map(jax.typeof, arrays)), call, place)  # checks here, so peers get the error
    run = bind if traced(arrays) else run_alone
    return lambda: jax.tree.unflatten(form, run(call, arrays, place))


@collective(Op.ALLREDUCE, calls=_calls(Op.ALLREDUCE))
def allreduce(
    tree: Tree,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Tree:
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shapes and dtypes must be equal on all ranks. Within jit, every op except Adasum works. For
    Average and Sum, the derivative is the same reduction of the gradients. Returns new arrays.

    - tree: a JAX array, or a pytree of JAX arrays that are sent together. Numbers and NumPy arrays
      are converted.
    - op: Average (the default), Sum, Min, Max, Product or Adasum.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce({"w": jnp.ones(2)}, op=hvd.Sum, prescale_factor=3.0)
        {'w': Array([3., 3.], dtype=float32)}
        >>> jax.jit(hvd.allreduce)(jnp.arange(2.0))
        Array([0., 1.], dtype=float32)
    """
    factors = (prescale_factor, postscale_factor)
    call = reduction(Op.ALLREDUCE, op, factors, name, process_set)
    return then(_meeting(call, tree, process_set, timeout))


@collective(Op.REDUCESCATTER, calls=_calls(Op.REDUCESCATTER))
def reducescatter(
    tree: Tree,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Tree:
    """Reduces arrays. Returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Arrays need at least one dimension. Shapes and dtypes must be equal on all ranks. If rows do not
    divide evenly, the first ranks get one row more. Every op except Adasum works. For Average and
    Sum, the derivative is an allgather. Returns new arrays.

    - tree: a JAX array, or a pytree of JAX arrays that are sent together. Numbers and NumPy arrays
      are converted.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reducescatter(jnp.arange(3), op=hvd.Sum)
        Array([0, 1, 2], dtype=int32)
    """
    factors = (prescale_factor, postscale_factor)
    call = reduction(Op.REDUCESCATTER, op, factors, name, process_set)
    return then(_meeting(call, tree, process_set, timeout))


@collective(Op.ALLGATHER, calls=_calls(Op.ALLGATHER))
def allgather(
    tree: Tree,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Tree:
    """Concatenates all ranks' arrays along the first dimension, in rank order.

    Arrays need at least one dimension. Dtypes and all dimensions but the first must be equal on all
    ranks. Within jit, the first dimension must be equal as well. The derivative is a reducescatter,
    which gives this rank's rows of the summed gradients. Returns new arrays.

    - tree: a JAX array, or a pytree of JAX arrays that are sent together. Numbers and NumPy arrays
      are converted.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allgather(jnp.arange(3))
        Array([0, 1, 2], dtype=int32)
    """
    call = Call(Op.ALLGATHER, name, set_id(process_set))
    return then(_meeting(call, tree, process_set, timeout))


@collective(Op.BROADCAST, calls=_calls(Op.BROADCAST))
def broadcast(
    tree: Tree,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Tree:
    """Sends the arrays of `root_rank` to every rank. Shapes and dtypes must match on all ranks.

    On the root, the derivative is the sum of all ranks' gradients; on other ranks it is zeros.
    Returns new arrays.

    - tree: a JAX array, or a pytree of JAX arrays that are sent together. Numbers and NumPy arrays
      are converted.
    - root_rank: the sender's rank in the world; it must be a member of the process set.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast(jnp.arange(3), root_rank=0)
        Array([0, 1, 2], dtype=int32)
    """
    call = Call(Op.BROADCAST, name, set_id(process_set), root=index(root_rank))
    return then(_meeting(call, tree, process_set, timeout))


# A list is a pytree.
grouped_allgather = allgather
grouped_allreduce = allreduce
grouped_reducescatter = reducescatter


@collective(Op.ALLTOALL, calls=_calls(Op.ALLTOALL))
def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Any:
    """Sends rows to each member, and receives rows from each member.

    Member i gets the next `splits[i]` rows of the array. The result holds the received rows in rank
    order. Arrays need at least one dimension. The dtype and all dimensions but the first must be
    equal on all ranks. Within jit, parts and shapes must be equal. The derivative sends the
    gradients back. Returns a new array. With `splits`, also returns the number of rows from each
    member, as NumPy int64.

    - tensor: a JAX array. A number or NumPy array is converted.
    - splits: the number of rows for each member, in member order. None means equal parts.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall(jnp.arange(3))
        Array([0, 1, 2], dtype=int32)
    """
    common: Any = {"name": name, "process_set": process_set, "timeout": timeout}
    tensor = jnp.asarray(tensor)
    if not _in_program(tensor):
        return then(lambda: ops.alltoall(tensor, splits, **common))
    _check_equal_parts(splits)
    call = Call(Op.ALLTOALL, name, set_id(process_set))
    return then(_meeting(call, tensor, process_set, timeout))


def _check_equal_parts(splits: Any) -> None:
    if splits is not None:
        raise ValueError(
            f"splits is {shown(splits)}, but within jit or on a GPU shapes must be known before "
            "the ranks meet: leave splits out for equal parts, or call outside of jit, on a CPU"
        )
