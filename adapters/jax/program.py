# SPDX-License-Identifier: Apache-2.0
"""Compiles and differentiates collectives within JAX programs.

collectives.py adds them while JAX traces. XLA calls the core on its own threads.

An ordered effect keeps collectives in the order in which they were traced, within a program and
between the programs of one thread. A process set therefore has at most one collective under way,
and all collectives without a name can share a name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive, Token
from jax.interpreters import ad, mlir

from farandole import ops, topology
from farandole.arrays.buffers import code_of
from farandole.calls.arguments import divisor_of
from farandole.calls.requests import MIRRORED, Call, Op
from farandole.calls.rows import kept
from farandole.errors import LibraryError, MismatchError, retyped
from farandole.members import ProcessSet
from farandole.ops import Average, Sum
from farandole.start import leaving
from farandole.xla import collective_handlers

UNNAMED = "jit"  # name of all collectives without a name
_TARGET = "farandole_collective"
Rows = tuple[int, ...]
_SCALAR = "a scalar has no first dimension to divide; give it shape (1,)"


try:
    # This is private API, because JAX has no public effect that orders instructions, and no public
    # access to the tokens that it passes from program to program.
    from jax._src import dispatch, effects
    from jax._src.interpreters.pxla import MeshExecutable

    class _Ordered(effects.Effect):  # type: ignore[misc]
        """Marks a program that communicates with other ranks."""

        __repr__ = lambda _: "collectives of farandole"  # noqa: E731

    for _allowed in (
        effects.ordered_effects,
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        _allowed.add_type(_Ordered)
    _jax_token_input = dispatch.RuntimeTokenSet.get_token_input
    _jax_fast_call = MeshExecutable.create_cpp_call
    for _platform, _handler in collective_handlers().items():
        jax.ffi.register_ffi_target(_TARGET, _handler, platform=_platform)
except Exception as reason:
    raise LibraryError(
        f"farandole.jax does not work with jax {jax.__version__}: {reason}. Remedy: use a version "
        "that docs/jax.md lists"
    ) from reason

_effect = _Ordered()
_token = jax.typeof(Token(None))


def _token_input(tokens: Any, effect: Any, devices: Any) -> Any:
    """Returns a program's first token.

    For farandole's effect, first waits until the thread's last program has ended, and drops that
    program's token, so that the new program gets a new token. JAX would reuse the old token, and
    one failed program would then make all later programs fail.
    """
    if effect is _effect and (last := tokens.current_tokens.pop(effect, None)) is not None:
        with contextlib.suppress(Exception):
            last.block_until_ready()
    return _jax_token_input(tokens, effect, devices)


dispatch.RuntimeTokenSet.get_token_input = _token_input


def _fast_call(executable: Any, *args: Any) -> Any:
    """Returns JAX's fast call of a program that was compiled ahead of time (lower().compile()).

    The fast call does not pass a token. If the program contains farandole's collectives, returns
    None, which makes JAX use its ordinary call.
    """
    if _effect in getattr(executable.unsafe_call, "ordered_effects", ()):
        return None
    return _jax_fast_call(executable, *args)


MeshExecutable.create_cpp_call = _fast_call


class Placement(NamedTuple):
    """The rank and members for which a program is compiled."""

    process_set: ProcessSet
    members: tuple[int, ...]  # ranks of the world
    rank: int  # this rank's number in the world

    def rows(self, rows: int) -> int:
        """Returns the number of rows that this rank gets from a reducescatter of `rows` rows."""
        return kept(rows, len(self.members))[self.members.index(self.rank)]

    def part(self, rows: int) -> int:
        """Returns the number of rows per member. Raises ValueError if they don't divide evenly."""
        if rows % len(self.members):
            raise ValueError(
                f"the first dimension ({rows}) must be a multiple of {len(self.members)} ranks: "
                "within jit parts are equal"
            )
        return rows // len(self.members)


def placement_of(process_set: ProcessSet) -> Placement:
    """Returns this rank's placement in a set. Raises ValueError if this rank is not a member."""
    process_set.rank()  # raises
    return Placement(process_set, tuple(process_set.ranks or ()), topology.rank())


class _Rule(NamedTuple):
    back: Op  # the op that turns cotangents of results into cotangents of inputs
    now: Callable[[Sequence[Any], Call, dict[str, Any]], list[Any]]  # makes the call with values
    # Computes the number of a result's rows from the number of the input's rows.
    rows: Callable[[Placement, int], int] = lambda _, rows: rows


_REDUCTIONS = (Op.ALLREDUCE, Op.REDUCESCATTER)


def _reduced(call: Call) -> dict[str, Any]:
    scaled = {"prescale_factor": call.prescale, "postscale_factor": call.postscale}
    return {"op": call.reduce_op, **scaled}


RULES = {
    Op.ALLREDUCE: _Rule(
        Op.ALLREDUCE,
        lambda xs, call, common: ops.grouped_allreduce(xs, **_reduced(call), **common),
    ),
    Op.REDUCESCATTER: _Rule(
        Op.ALLGATHER,
        lambda xs, call, common: ops.grouped_reducescatter(xs, **_reduced(call), **common),
        Placement.rows,
    ),
    Op.BROADCAST: _Rule(
        Op.ALLREDUCE,
        lambda xs, call, common: ops.broadcast_list(xs, call.root, **common).wait(),
    ),
    Op.ALLGATHER: _Rule(
        Op.REDUCESCATTER,
        lambda xs, call, common: ops.grouped_allgather(xs, **common),
        lambda place, rows: rows * len(place.members),
    ),
    Op.ALLTOALL: _Rule(
        Op.ALLTOALL,
        lambda xs, call, common: [ops.alltoall(xs[0], **common)],
        lambda place, rows: place.part(rows) * len(place.members),
    ),
}

collective_p = Primitive("farandole")
collective_p.multiple_results = True


def bind(call: Call, arrays: Sequence[Any], place: Placement, rows: Rows = ()) -> list[Any]:
    """Adds a call, as one group, to the traced program. Returns the results.

    At least one array must be traced. For an allgather, `rows` holds the first dimension of each
    result. If it is empty, that dimension is this rank's number of rows times the number of
    members.
    """
    made: list[Any] = collective_p.bind(*arrays, call=call, place=place, rows=rows)
    return made


def results_of(avals: Sequence[Any], call: Call, place: Placement, rows: Rows = ()) -> list[Any]:
    """Returns the shapes and dtypes of a call's results.

    Raises TypeError or ValueError if the core does not support the arrays.
    """
    found = []
    for i, aval in enumerate(avals):
        code_of(np.dtype(aval.dtype))  # raises
        shape = aval.shape
        if call.op not in MIRRORED:
            if not shape:
                raise ValueError(_SCALAR)
            of_result = rows[i] if rows else RULES[call.op].rows(place, shape[0])
            shape = (of_result, *shape[1:])
        found.append(jax.core.ShapedArray(shape, aval.dtype))
    return found


@collective_p.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(*avals: Any, call: Call, place: Placement, rows: Rows) -> tuple[list[Any], set[Any]]:
    return results_of(avals, call, place, rows), {_effect}


@collective_p.def_impl  # type: ignore[untyped-decorator]
def _now(*arrays: Any, call: Call, place: Placement, rows: Rows) -> list[Any]:
    """Makes the call outside of jit, for example when JAX differentiates without compiling."""
    common: dict[str, Any] = {"name": call.name, "process_set": place.process_set}
    found = RULES[call.op].now(tuple(map(jnp.asarray, arrays)), call, common)
    avals = results_of(list(map(jax.typeof, arrays)), call, place, rows)
    for x, aval in zip(found, avals, strict=True):
        if x.shape != aval.shape:
            raise MismatchError(
                f"{call}: rank {place.rank} gets shape {x.shape}, but its program expects "
                f"{aval.shape}: while JAX traces or differentiates, shapes must be equal on all "
                "ranks, and no rank may have joined; call outside of jit and grad, or before any "
                "rank calls join()"
            )
    return found


def _lowered(ctx: Any, *operands: Any, call: Call, place: Placement, rows: Rows) -> Any:
    """Lowers the call to a custom call that takes a token, calls the core and returns a token."""
    avals_in, avals_out = [_token, *ctx.avals_in], [_token, *ctx.avals_out]
    whole = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    head = [call.op, call.reduce_op, call.root, call.process_set, place.rank]
    attributes = {
        "call": np.array(head, np.int32),
        "dtypes": np.array([code_of(np.dtype(x.dtype)) for x in ctx.avals_in], np.int32),
        "members": np.array(place.members, np.int32),
        "factors": np.array([call.prescale, call.postscale], np.float64),
        "name": call.name or UNNAMED,
    }
    lower = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
    before = ctx.tokens_in.get(_effect)
    after, *results = lower(whole, before, *operands, **attributes)
    ctx.set_tokens_out(mlir.TokenSet({_effect: after}))
    return results


def _elsewhere(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "within jit farandole.jax supports CPUs and CUDA only: compile for a CPU, with "
        '`jax.default_device(jax.devices("cpu")[0])`, and pass arrays on that device'
    )


mlir.register_lowering(collective_p, _elsewhere)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(collective_p, _lowered, platform=_platform)


leaving.wait_first(jax.effects_barrier)


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raises farandole's own errors for failed collectives within jit.

    JAX returns before a program has run, so wait inside the block for the results that you need.
    Replaces JaxRuntimeError with MismatchError, PeerError and so on. Does not change other errors.

    Examples:
        >>> with hvd.typed_errors():
        ...     jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.ones(2)))
        Array([1., 1.], dtype=float32)
    """
    with retyped(jax.errors.JaxRuntimeError):
        yield


_alone = jax.jit(lambda arrays, call, place: bind(call, arrays, place), static_argnums=(1, 2))


def run_alone(call: Call, arrays: Sequence[Any], place: Placement) -> list[Any]:
    """Runs a call on GPU values in a separate program, and returns the results."""
    with typed_errors():
        results: list[Any] = jax.block_until_ready(_alone(list(arrays), call, place))
        return results


# ---- derivatives of the sum of all ranks' losses

_LINEAR_OPS = (Average, Sum)


def _dependent_zeros(x: Any) -> Any:
    """Returns zeros that depend on `x`. With constant zeros, JAX would remove the collective."""
    return jnp.where(False, x, jnp.zeros_like(x))


def _is_linear(call: Call) -> bool:
    return call.op not in _REDUCTIONS or call.reduce_op in _LINEAR_OPS


def _named(call: Call, suffix: str) -> Call:
    name = call.name and f"{call.name.removesuffix('.tangent')}.{suffix}"
    return replace(call, name=name)


def _jvp(primals: Any, tangents: Any, *, call: Call, place: Placement, rows: Rows) -> Any:
    results = bind(call, primals, place, rows)
    moving = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]
    if moving and not _is_linear(call):
        raise NotImplementedError(f"{call} has a derivative for Average and Sum only")
    found: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if moving:
        # Sends the tangents of all real tensors, so that all ranks send the same tensors.
        real = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
        sent = [ad.instantiate_zeros(tangents[i]) for i in real]
        of_real = tuple(rows[i] for i in real) if rows else ()
        for i, x in zip(real, bind(_named(call, "tangent"), sent, place, of_real), strict=True):
            found[i] = x
    return results, found


def _transposed(cotangents: Any, *inputs: Any, call: Call, place: Placement, rows: Rows) -> Any:
    """Turns cotangents of the results into cotangents of the inputs. A group is one call."""
    given, scale = [ad.instantiate_zeros(x) for x in cotangents], 1.0
    op = RULES[call.op].back
    back = replace(_named(call, "gradient"), op=op, root=-1)
    if call.op not in _REDUCTIONS:
        back = replace(back, reduce_op=Sum)
    elif op not in _REDUCTIONS:
        back = replace(back, prescale=1.0, postscale=1.0)
        scale = call.prescale * call.postscale / divisor_of(call.reduce_op, call.process_set)
    scattered = call.op is Op.REDUCESCATTER
    rows = tuple(x.aval.shape[0] for x in inputs) if scattered else ()
    found = bind(back, given, place, rows)
    if call.root >= 0 and place.rank != call.root:
        return [_dependent_zeros(x) for x in found]
    return found if scale == 1.0 else [_scaled(x, scale) for x in found]


def _scaled(x: Any, scale: float) -> Any:
    """Returns scale * x. The factor may be too small for a short float."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(dtype) * jnp.asarray(scale, dtype)).astype(x.dtype)


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transposed
