# SPDX-License-Identifier: Apache-2.0
"""Prepared calls of a group, so that repeated calls skip planning.

group.py uses them from any thread.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor

from farandole._library import is_from_core
from farandole.arrays.buffers import EMPTY, Buffer
from farandole.arrays.kinds import kind_of
from farandole.c10d.calls import Plan
from farandole.calls.leases import lend
from farandole.calls.requests import Call, Op, PreparedCall, told
from farandole.calls.sites import Site, here

__all__ = ["PreparedPlan", "key_of", "prepare"]


# The key is c10d's method. The value holds the core's operation if no tensor is copied, and the
# only option that is part of a prepared call's key. There is only one such option, because reading
# an option takes as long as reading ten attributes of a tensor.
_KINDS: dict[str, tuple[Op, str]] = {
    "allreduce": (Op.ALLREDUCE, "reduceOp"),
    "broadcast": (Op.BROADCAST, "rootRank"),
    "all_gather_single": (Op.ALLGATHER, "timeout"),
    "_allgather_base": (Op.ALLGATHER, "timeout"),
    "reduce_scatter_single": (Op.REDUCESCATTER, "reduceOp"),
    "_reduce_scatter_base": (Op.REDUCESCATTER, "reduceOp"),
    "barrier": (Op.BARRIER, "timeout"),
}
# The key, the input and the output (None if the call has none), and c10d's options.
Keyed = tuple[Hashable, Tensor | None, Tensor | None, Any]
_NO_KEY: Keyed = None, None, None, None


def key_of(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Keyed:
    """Returns the key of the call's prepared plan, and the call's arguments.

    Returns _NO_KEY if the call cannot have a prepared plan.
    """
    if kind not in _KINDS:
        return _NO_KEY
    if kwargs:
        if len(kwargs) > 1 or "opts" not in kwargs:
            return _NO_KEY
        args = *args, kwargs["opts"]
    try:
        *tensors, options = args
        terms = kind, getattr(options, _KINDS[kind][1])
        if kind == "barrier":
            return _NO_KEY if tensors else (terms, None, None, options)
        if len(tensors) == 1:
            (x,) = tensors[0]
            return (terms, x.dtype, x.shape), x, x, options
        y, x = tensors
        return (terms, x.dtype, x.shape, y.dtype, y.shape, x is y), x, y, options
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # The arguments are separate options, lists of tensors or nested tensors.
        return _NO_KEY


def prepare(
    kind: str, rank: int, plan: Plan, call: Call, buffer: Buffer, x: Tensor | None, y: Tensor | None
) -> PreparedPlan | None:
    """Returns a plan for repetitions of this call, or None if the call needs copies of its tensors.

    `buffer` is the core's input. `rank` is this process's rank in the group.
    """
    op, _ = _KINDS[kind]
    if plan.op is not op or "prescale" in plan.terms:
        return None
    if x is not None and y is not None:
        ((source,), (target,)) = plan.inputs, plan.outputs
        if x.device.type != "cpu" or not (_is_at(source, x) and _is_at(target, y)):
            return None
    return PreparedPlan(rank, call, buffer, x, y)


def _is_at(used: Tensor | None, x: Tensor) -> bool:
    return used is not None and x.is_contiguous() and used.data_ptr() == x.data_ptr()


class PreparedPlan:
    """A call whose tensors the core reads and writes in place."""

    __slots__ = ("_buffer", "_call", "_input", "_lent", "_output", "_place", "_prepared")

    def __init__(
        self, rank: int, call: Call, buffer: Buffer, x: Tensor | None, y: Tensor | None
    ) -> None:
        """Takes the arguments of prepare(). Does not keep any tensor alive."""
        self._call = call
        self._buffer = replace(buffer, pointer=EMPTY, owner=None, stream=0)
        self._lent: Any = None if x is None else kind_of(x).lent
        self._input = x is not None and (x.dtype, x.shape)
        self._output = y is not None and y is not x and (y.dtype, y.shape)
        # Byte offset at which the input may lie in the output, or None if they must not overlap.
        self._place = rank * x.nbytes if x is not None and call.op is Op.ALLGATHER else None
        self._prepared: dict[str, PreparedCall] = {}  # keys are texts of call sites

    def start(self, x: Tensor | None, y: Tensor | None, waits: bool) -> int | None:
        """Submits the call. Returns the core's handle, or 0 if the call is complete.

        Returns None if the call was not submitted because a tensor has a different layout. `waits`
        is True if the caller waits for the call at once.
        """
        pointer = output = 0
        memory: object = None
        if self._input:
            pointer, memory = self._lent(x, *self._input, x is y)
            output = pointer
            if self._output:
                output, written = self._lent(y, *self._output, True)
                memory = memory, written
            if not pointer or not output:
                return None
            if self._output and not self._may_lie(pointer, x, output, y):
                return None
        site = here(4)  # skips here(), this method, the group's start() and the collective's method
        call = self._prepared.get(site.text) or self._prepare(site)
        try:
            return lend(call.call if waits else call.start, pointer, output, memory)
        except Exception as reason:
            if is_from_core(reason):  # the core has reported this error to the peers
                told(reason)
            raise

    def _may_lie(self, pointer: int, x: Any, output: int, y: Any) -> bool:
        """Returns False if input and output overlap in a way that requires a copy."""
        apart: bool = pointer + x.nbytes <= output or output + y.nbytes <= pointer
        return apart or (self._place is not None and pointer == output + self._place)

    def _prepare(self, site: Site) -> PreparedCall:
        call = PreparedCall(self._call, self._buffer, site=site)
        return self._prepared.setdefault(site.text, call)  # another thread may have been first
