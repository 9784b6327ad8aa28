# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training with JAX: reduces gradients in optax optimizers and in jax.grad.

Both work within jit as well. broadcast_parameters() works outside of jit only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import numpy as jnp

from farandole.calls.arguments import check, check_compression
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.jax.collectives import allreduce, broadcast
from farandole.jax.compression import Compression
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average
from farandole.parameters import PARAMETERS, agree_on_parameters, root_in

Tree = TypeVar("Tree")


class Accumulated(NamedTuple):
    """State of distributed(every=n), with the gradients since the last reduction."""

    inner: Any
    gradients: Any
    passes: Any  # int32


def _reducer(
    op: int, compression: Any, process_set: ProcessSet, name: str | None
) -> Callable[[Any], Any]:
    """Returns a function that reduces a pytree of gradients. Raises an error for wrong options."""
    check(op=op, process_set=process_set)
    check_compression(compression)

    def reduce(gradients: Any) -> Any:
        leaves, form = jax.tree.flatten(gradients)
        sent = [compression.compress(jnp.asarray(x)) for x in leaves]
        reduced = allreduce([x for x, _ in sent], op=op, name=name, process_set=process_set)
        pairs = zip(reduced, sent, strict=True)
        whole = [compression.decompress(x, context) for x, (_, context) in pairs]
        return jax.tree.unflatten(form, whole)

    return reduce


def distributed(
    optimizer: Any,
    *,
    op: int = Average,
    compression: Any = Compression.none,
    every: int = 1,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """Wraps an optax optimizer so that its updates use the reduced gradients of all ranks.

    - optimizer: an optax.GradientTransformation, such as optax.adam(1e-3).
    - op: Average, Sum, Min, Max or Product of the ranks' gradients.
    - compression: Compression.none, fp16 or bf16, or a class with compress and decompress.
    - every: number of update() calls over which gradients are averaged before the ranks reduce
      them. The other calls return zero updates.
    - process_set: the ranks that reduce.
    - name: the name of the collective. If it is None, collectives are matched by order.

    Returns an optax.GradientTransformationExtraArgs, whose update() works within jit. With every=1,
    its state is the same as the optimizer's own state, so their checkpoints are interchangeable.
    Raises ValueError and TypeError for wrong options.

    Examples:
        >>> optimizer = hvd.distributed(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, _ = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params), params)
        >>> updates
        {'w': Array([-0.5, -0.5], dtype=float32)}
    """
    import optax

    check(every=every)
    reduce = _reducer(op, compression, process_set, name)
    inner = optax.with_extra_args_support(optimizer)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(reduce(gradients), state, params, **extra)

    if every == 1:
        return optax.GradientTransformationExtraArgs(inner.init, update)

    def init(params: Any) -> Accumulated:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Accumulated(inner.init(params), zeros, jnp.zeros((), jnp.int32))

    def gather(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        total = jax.tree.map(
            lambda sum_, x: (sum_ + x / every).astype(sum_.dtype), state.gradients, gradients
        )

        def step() -> Any:
            updates, after = update(total, state.inner, params, **extra)
            zeros = jax.tree.map(jnp.zeros_like, total)
            return updates, Accumulated(after, zeros, jnp.zeros_like(state.passes))

        def wait() -> Any:
            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(step)[0])
            return zeros, Accumulated(state.inner, total, state.passes + 1)

        return jax.lax.cond(state.passes == every - 1, step, wait)

    return optax.GradientTransformationExtraArgs(init, gather)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    op: int = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Callable[..., Any]:
    """Differentiates `fun`, as jax.value_and_grad does, and reduces the gradients over the ranks.

    Takes `fun`, `argnums` and `has_aux` as jax.value_and_grad does, and the options of
    distributed(). The returned value is that of this rank. The gradients are reduced as one group.
    Works within jit.

    Examples:
        >>> hvd.value_and_grad(lambda w: (w * w).sum())(jnp.ones(2))
        (Array(2., dtype=float32), Array([2., 2.], dtype=float32))
    """
    reduce = _reducer(op, compression, process_set, name)
    local = jax.value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = local(*args, **kwargs)
        return value, reduce(gradients)

    return call


def grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    op: int = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Callable[..., Any]:
    """Differentiates `fun`, as jax.grad does, and reduces the gradients over the ranks.

    The arguments are those of value_and_grad().

    Examples:
        >>> hvd.grad(lambda w: (w * w).sum())(jnp.ones(2))
        Array([2., 2.], dtype=float32)
    """
    options: Any = {"op": op, "compression": compression, "process_set": process_set, "name": name}
    both = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call


@collective(Op.ALLGATHER, unnamed=PARAMETERS)
def broadcast_parameters(
    params: Tree,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> Tree:
    """Returns a pytree like `params` with the root's values.

    The pytree may hold parameters or an optimizer's state. Leaves may be numbers, or arrays of any
    dtype and shape. Without jax_enable_x64, JAX truncates 64-bit leaves, so large integers become
    wrong. Does not work within jit. If calls come from several threads, give each call a `name`. If
    one rank has an error, all ranks raise it: a ValueError if structures or roots differ, a
    TypeError if leaves are not arrays, or a MismatchError if shapes or dtypes differ.

    - params: a pytree of arrays.
    - root_rank: the sender's rank in the world; it must be a member of the process set.
    - process_set: the ranks that take part, by default all.
    - name: the prefix of the calls' names. If it is None, all such calls use the same prefix.
    - timeout: seconds until each wait raises StallError. None means no limit.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast_parameters({"weight": jnp.arange(3)}, root_rank=0)
        {'weight': Array([0, 1, 2], dtype=int32)}
    """
    root = root_in(root_rank, process_set)
    paths, form = jax.tree.flatten_with_path(params)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    arrays = [jnp.asarray(leaf) for _, leaf in paths]
    prefix = PARAMETERS if name is None else name

    def meet() -> Tree:
        agree_on_parameters(names, root, prefix, process_set, timeout)
        named = f"{prefix}.values"
        common: Any = {"process_set": process_set, "timeout": timeout}
        found = broadcast(arrays, root, name=named, **common)
        whole: Tree = jax.tree.unflatten(form, found)
        return whole

    return then(meet)
