# SPDX-License-Identifier: Apache-2.0
"""Translates each c10d collective into one call of the core. group.py uses it from any thread.

A plan function takes the group, the method's arguments and c10d's options. It makes the checks that
the core cannot make. If a tensor is not contiguous, the core gets a copy of the tensor, and
`finish` copies the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from farandole.calls.arguments import divisor_of
from farandole.calls.requests import Op
from farandole.errors import MismatchError
from farandole.members import set_id
from farandole.ops import Average, Max, Min, Product, Sum
from farandole.torch.collectives.sparse import elements_of, sum_of
from farandole.torch.kind import check, check_unused, in_order, is_lazy, store
from farandole.torch.strides import check_apart

__all__ = ["PLANS", "Options", "Plan", "check_writable", "one", "output_for"]

Tensors = Sequence[Tensor]
Nested = Sequence[Sequence[Tensor]] | Sequence[Tensor]
# For each output that the core allocates, the output's memory and every member's number of rows.
Received = Sequence[tuple[Tensor, tuple[int, ...]]]
Finish = Callable[[Received], None]

_OPS = {
    ReduceOp.SUM: Sum,
    ReduceOp.AVG: Average,
    ReduceOp.MIN: Min,
    ReduceOp.MAX: Max,
    ReduceOp.PRODUCT: Product,
}
_BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


@dataclass
class Options:
    """c10d's options that farandole uses. `root` is a rank of the group; `timeout` is seconds."""

    op: Any = ReduceOp.SUM
    root: int = 0
    timeout: Any = None


@dataclass
class Plan:
    """A planned call. If an output is None, the core allocates that output.

    For a reduction, None instead means that the core drops the result.
    """

    op: Op
    inputs: Tensors
    outputs: Sequence[Tensor | None]
    results: Tensors  # c10d's outputs, which are complete after `finish`
    finish: Finish
    terms: dict[str, Any] = field(default_factory=dict)  # more fields of Call

    def writes(self) -> Tensors:
        """Returns the user's tensors to which the core or `finish` writes."""
        # A broadcast does not write to the root's tensor.
        return () if self.finish is _write_nothing else self.results


def one(x: Tensor | Tensors) -> Tensor:
    """Returns a list's only tensor. c10d takes lists because processes once had several GPUs."""
    if isinstance(x, Tensor):
        return x
    if len(x) != 1:
        raise ValueError(f"the list holds {len(x)} tensors: pass one tensor on each rank")
    return x[0]


def _many(xs: Nested | Tensor) -> list[Tensor]:
    if isinstance(xs, Tensor):
        return [xs]
    nested = [x for x in xs if not isinstance(x, Tensor)]
    if len(nested) > 1:
        raise ValueError(f"{len(nested)} lists of tensors were passed: pass one on each rank")
    return list(nested[0] if nested else xs)  # type: ignore[arg-type]


def _contiguous(x: Tensor) -> Tensor:
    """Returns `x`, or a copy if `x` is not contiguous."""
    check(x)
    return in_order(x.detach())


def _copied(xs: Tensors) -> list[Tensor]:
    """Checks tensors that the caller will copy. Resolves lazy conjugation and negation."""
    for x in xs:
        check(x)
        check_unused(x)
    return [x.detach().resolve_conj().resolve_neg() for x in xs]


def output_for(x: Tensor) -> Tensor:
    """Returns `x`, or uninitialised memory with the shape of `x` if `x` is not contiguous."""
    check(x)
    dense = x.is_contiguous() and not is_lazy(x)
    return x.detach() if dense else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _apart(x: Tensor, others: Tensors, copy: bool = False) -> Tensor:
    """Returns `x`, or new memory if `x` overlaps `others`. With `copy`, the values are copied."""
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    if not any(y.data_ptr() < end and begin < y.data_ptr() + y.nbytes for y in others):
        return x
    return _copied([x])[0].clone() if copy else torch.empty_like(x)


def check_writable(plan: Plan) -> None:
    """Raises ValueError if elements of a result share memory or an earlier call uses a result."""
    # The core itself checks these outputs.
    own = {(y.data_ptr(), y.nbytes) for y in plan.outputs if y is not None}
    for x in plan.writes():
        if x.layout is torch.strided:
            check_apart(x)
            if x.is_contiguous() and (x.data_ptr(), x.nbytes) in own:
                continue
        check_unused(x, writes=True)


def _write(results: Tensors, buffers: Tensors, _: Received = ()) -> None:
    for x, buffer in zip(results, buffers, strict=True):
        if x.data_ptr() != buffer.data_ptr() or not x.is_contiguous():
            store(buffer.view(x.shape), x)


def _kind(op: Any) -> Any:
    """Returns the kind of reduction, without PREMUL_SUM's factor."""
    return getattr(op, "op", op)


def _terms(op: Any, xs: Tensors) -> dict[str, Any]:
    kind = _kind(op)
    if kind == ReduceOp.SUM and all(x.dtype is torch.bool for x in xs):
        kind = ReduceOp.MAX  # for bool, c10d's SUM and MAX both mean "any", and DTensor needs that
    if kind == ReduceOp.PREMUL_SUM:
        factor = getattr(op, "factor", None)
        return {
            "reduce_op": Sum,
            "prescale": float(op.__getstate__()[1] if factor is None else factor),
        }
    if kind not in _OPS:
        raise TypeError(f"only all_reduce and reduce support {kind}")
    return {"reduce_op": _OPS[kind]}


def _root_of(group: Any, root: int) -> int:
    if not 0 <= root < group.size():
        raise ValueError(f"root {root} is not a rank of this group of {group.size()} ranks")
    return int(group.ranks[root])


def _is_bitwise(options: Options) -> bool:
    return _kind(options.op) in _BITWISE


def _alike(what: str, tensors: Tensors, count: int, like: Tensor) -> None:
    if len(tensors) != count:
        raise ValueError(f"{what} has {len(tensors)} tensors for {count} ranks: pass one per rank")
    for i, x in enumerate(tensors):
        if x.shape != like.shape or x.dtype != like.dtype:
            raise ValueError(
                f"{what}[{i}] has shape {tuple(x.shape)} and dtype {x.dtype}; it must have "
                f"{tuple(like.shape)} and {like.dtype}, like this rank's other tensor"
            )


# ---- reductions


def _allreduce(group: Any, tensors: Tensors | Tensor, options: Options) -> Plan:
    x = one(tensors)
    if x.layout is not torch.sparse_coo:
        return _reduced(group, [x], options)
    op = _kind(options.op)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise TypeError(f"sparse tensors can be summed or averaged only, not {op}")
    divisor = divisor_of(_OPS[op], set_id(group._set))

    def finish(received: Received) -> None:
        shapes, indices, values = (rows for rows, _ in received)
        if any(shape != list(x.shape) for shape in shapes.tolist()):
            raise MismatchError(f"all_reduce in {group.label}: ranks have shapes {shapes.tolist()}")
        store(sum_of(indices, values, x, divisor, f"all_reduce in {group.label}"), x)

    return Plan(Op.ALLGATHER, elements_of(x), [None] * 3, [x], finish)


def _allreduce_coalesced(group: Any, tensors: Tensors, options: Options) -> Plan:
    return _reduced(group, tensors, options)


def _reduced(group: Any, xs: Tensors, options: Options, keep: bool = True) -> Plan:
    """Plans a reduction. `keep` is True if this rank gets the result."""
    if _is_bitwise(options):
        return _combined(group, xs, options, keep)
    buffers = [_contiguous(x) for x in xs]
    for i, buffer in enumerate(buffers):  # a tensor may be listed twice
        if any(buffer.data_ptr() == other.data_ptr() for other in buffers[:i]):
            buffers[i] = _copied([buffer])[0].clone()
    finish = partial(_write, xs, buffers) if keep else _write_nothing
    outputs = buffers if keep else [None] * len(buffers)
    return Plan(Op.ALLREDUCE, buffers, outputs, xs, finish, _terms(options.op, xs))


def _write_nothing(_: Received) -> None:
    pass


def _combined(group: Any, xs: Tensors, options: Options, keep: bool) -> Plan:
    """Plans a bitwise reduction. The core has none, so all ranks gather and combine all inputs."""
    wholes = [torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device) for x in xs]
    combine = _BITWISE[_kind(options.op)]
    if any(x.is_floating_point() or x.is_complex() for x in xs):
        raise TypeError(f"{options.op} is defined for integers and bool, not {xs[0].dtype}")

    def finish(_: Received) -> None:
        for x, whole in zip(xs, wholes, strict=True):
            total = whole[0]
            for rows in whole[1:]:
                total = combine(total, rows)
            store(total, x)

    plan = _gathered(group, wholes, xs)
    return Plan(plan.op, plan.inputs, plan.outputs, xs, finish if keep else _write_nothing)


def _reduce(group: Any, tensors: Tensors | Tensor, options: Options) -> Plan:
    root = _root_of(group, options.root)
    plan = _reduced(group, [one(tensors)], options, keep=options.root == group.rank())
    if plan.op is Op.ALLREDUCE:
        plan.op, plan.terms = Op.REDUCE, plan.terms | {"root": root}
    return plan


def _reduce_scatter(group: Any, outputs: Any, inputs: Nested, options: Options) -> Plan:
    y, xs = one(outputs), _many(inputs)
    _alike("input_list", xs, group.size(), y)
    return _scattered(group, [y], [torch.stack(_copied(xs))], options)


def _reduce_scatter_single(group: Any, output: Any, input: Any, options: Options) -> Plan:
    return _scattered(group, _many(output), _many(input), options)


def _scattered(group: Any, ys: Tensors, wholes: Tensors, options: Options) -> Plan:
    buffers = [
        _parted("input", whole, y, group.size()) for y, whole in zip(ys, wholes, strict=True)
    ]
    targets = [_apart(output_for(y), buffers) for y in ys]
    finish = partial(_write, ys, targets)
    return Plan(Op.REDUCESCATTER, buffers, targets, ys, finish, _terms(options.op, ys))


def _parted(what: str, whole: Tensor, part: Tensor, size: int) -> Tensor:
    """Views `whole` as one row per rank. Each row has the shape of `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{what} has shape {tuple(whole.shape)} and dtype {whole.dtype}: for {size} ranks and "
            f"a part of shape {tuple(part.shape)} it needs {size * part.numel()} elements of "
            f"{part.dtype}"
        )
    return _contiguous(whole).view(size, *part.shape)


# ---- broadcasts, gathers, scatters, alltoalls


def _broadcast(group: Any, tensors: Tensors | Tensor, options: Options) -> Plan:
    xs = [one(tensors)]
    buffers = [_contiguous(x) for x in xs]
    root = {"root": _root_of(group, options.root)}
    sends = options.root == group.rank()
    finish = _write_nothing if sends else partial(_write, xs, buffers)
    return Plan(Op.BROADCAST, buffers, buffers, xs, finish, root)


def _gathered(group: Any, wholes: Tensors, parts: Tensors) -> Plan:
    """Plans an allgather. Each rank passes one row, so the core rejects parts of unequal size."""
    targets = [output_for(whole) for whole in wholes]
    for target, part in zip(targets, parts, strict=True):
        _parted("output", target, part, group.size())
    rows = [_contiguous(x).unsqueeze(0) for x in parts]
    for i, row in enumerate(rows):  # a row may overlap the output only at this rank's row
        own = targets[i].data_ptr() + group.rank() * row.nbytes
        if row.data_ptr() != own:
            rows[i] = _apart(row, targets, copy=True)
    return Plan(Op.ALLGATHER, rows, targets, wholes, partial(_write, wholes, targets))


def _all_gather_single(group: Any, output: Any, input: Any, options: Options) -> Plan:
    return _gathered(group, _many(output), _many(input))


def _allgather(group: Any, outputs: Nested, tensors: Tensors | Tensor, options: Options) -> Plan:
    return _into_lists(group, [_many(outputs)], [one(tensors)])


def _allgather_coalesced(group: Any, outputs: Any, tensors: Tensors, options: Options) -> Plan:
    return _into_lists(group, [[ys[i] for ys in outputs] for i in range(len(tensors))], tensors)


def _into_lists(group: Any, lists: Sequence[Tensors], tensors: Tensors) -> Plan:
    wholes = []
    for ys, x in zip(lists, tensors, strict=True):
        _alike("output_list", ys, group.size(), x)
        wholes.append(torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device))

    def finish(_: Received) -> None:
        for ys, whole in zip(lists, wholes, strict=True):
            for y, row in zip(ys, whole, strict=True):
                store(row, y)

    plan = _gathered(group, wholes, tensors)
    return Plan(plan.op, plan.inputs, plan.outputs, [y for ys in lists for y in ys], finish)


def _gather(group: Any, outputs: Nested, tensors: Tensors | Tensor, options: Options) -> Plan:
    """Plans an alltoall of rows to the root. An extra dimension marks the call as a gather."""
    x, size, root = one(tensors), group.size(), options.root
    _root_of(group, root)
    ys = _many(outputs) if root == group.rank() else []
    if root == group.rank():
        _alike("gather_list", ys, size, x)
    row = _contiguous(x).reshape(1, *x.shape, 1)

    def finish(received: Received) -> None:
        ((whole, counts),) = received
        wanted = tuple(1 if ys else 0 for _ in range(size))
        _check_counts(group, "gather", counts, wanted)
        for y, rows in zip(ys, whole, strict=True):
            store(rows.view(y.shape), y)

    splits = tuple(1 if rank == root else 0 for rank in range(size))
    return Plan(Op.ALLTOALL, [row], [None], ys, finish, {"splits": splits})


def _scatter(group: Any, outputs: Any, inputs: Nested, options: Options) -> Plan:
    y, root = one(outputs), _root_of(group, options.root)
    whole = torch.empty((0, *y.shape), dtype=y.dtype, device=y.device)
    if options.root == group.rank():
        xs = _many(inputs)
        _alike("scatter_list", xs, group.size(), y)
        whole = torch.stack(_copied(xs))
    target = output_for(y)
    return Plan(Op.SCATTER, [whole], [target], [y], partial(_write, [y], [target]), {"root": root})


def _check_counts(group: Any, what: str, counts: Sequence[int], wanted: Sequence[int]) -> None:
    wrong = [i for i, (n, m) in enumerate(zip(counts, wanted, strict=True)) if n != m]
    if wrong:
        sent = ", ".join(f"rank {group.ranks[i]} sent {counts[i]}, not {wanted[i]}" for i in wrong)
        raise MismatchError(f"{what} in {group.label}: on rank {group.ranks[group.rank()]}: {sent}")


def _alltoall(group: Any, outputs: Tensors, inputs: Tensors, options: Options) -> Plan:
    for what, tensors in (("input_list", inputs), ("output_list", outputs)):
        if len(tensors) != group.size():
            raise ValueError(f"{what} has {len(tensors)} tensors for {group.size()} ranks")
    buffer = torch.cat([x.reshape(-1) for x in _copied(inputs)])

    def finish(received: Received) -> None:
        ((flat, counts),) = received
        _check_counts(group, "all_to_all, elements", counts, [y.numel() for y in outputs])
        for y, part in zip(outputs, torch.split(flat, list(counts)), strict=True):
            store(part.view(y.shape), y)

    splits = {"splits": tuple(x.numel() for x in inputs)}
    return Plan(Op.ALLTOALL, [buffer], [None], outputs, finish, splits)


def _all_to_all_single(
    group: Any, output: Tensor, input: Tensor, out: Any, into: Any, options: Options
) -> Plan:
    wanted, splits = (_rows(*pair, group.size()) for pair in ((output, out), (input, into)))

    def finish(received: Received) -> None:
        ((whole, counts),) = received
        _check_counts(group, "all_to_all_single, rows", counts, wanted)
        store(whole.view(output.shape), output)

    return Plan(Op.ALLTOALL, [_contiguous(input)], [None], [output], finish, {"splits": splits})


def _rows(x: Tensor, splits: Any, size: int) -> tuple[int, ...]:
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows to send")
    even = not splits and len(x) % size == 0
    rows = [len(x) // size] * size if even else list(splits or ())
    if len(rows) != size or sum(rows) != len(x):
        raise ValueError(
            f"split sizes {list(splits or ())} don't divide {len(x)} rows among {size} ranks"
        )
    return tuple(rows)


def _barrier(group: Any, options: Options) -> Plan:
    return Plan(Op.BARRIER, [], [], [], _write_nothing)


# The key is the name of c10d's method. The value holds the core's operation, the plan function, and
# the names of the options that may be passed by position instead of in an options object.
PLANS: dict[str, tuple[Op, Callable[..., Plan], tuple[str, ...]]] = {
    "allreduce": (Op.ALLREDUCE, _allreduce, ("op", "timeout")),
    "allreduce_coalesced": (Op.ALLREDUCE, _allreduce_coalesced, ("op", "timeout")),
    "reduce": (Op.REDUCE, _reduce, ("root", "op", "timeout")),
    "reduce_scatter": (Op.REDUCESCATTER, _reduce_scatter, ("op", "timeout")),
    "reduce_scatter_single": (Op.REDUCESCATTER, _reduce_scatter_single, ("op", "timeout")),
    "reduce_scatter_single_coalesced": (Op.REDUCESCATTER, _reduce_scatter_single, ("op",)),
    "broadcast": (Op.BROADCAST, _broadcast, ("root", "timeout")),
    "allgather": (Op.ALLGATHER, _allgather, ("timeout",)),
    "allgather_coalesced": (Op.ALLGATHER, _allgather_coalesced, ("timeout",)),
    "all_gather_single": (Op.ALLGATHER, _all_gather_single, ("timeout",)),
    "all_gather_single_coalesced": (Op.ALLGATHER, _all_gather_single, ("timeout",)),
    "gather": (Op.ALLTOALL, _gather, ("root", "timeout")),
    "scatter": (Op.SCATTER, _scatter, ("root", "timeout")),
    "alltoall": (Op.ALLTOALL, _alltoall, ("timeout",)),
    "all_to_all_single": (Op.ALLTOALL, _all_to_all_single, ("timeout",)),
    "barrier": (Op.BARRIER, _barrier, ("timeout",)),
}
# Other names of the same methods, in the present version of c10d or in older ones.
PLANS |= {
    "_allgather_base": PLANS["all_gather_single"],
    "allgather_into_tensor_coalesced": PLANS["all_gather_single_coalesced"],
    "_reduce_scatter_base": PLANS["reduce_scatter_single"],
    "reduce_scatter_tensor_coalesced": PLANS["reduce_scatter_single_coalesced"],
    "alltoall_base": PLANS["all_to_all_single"],
}
