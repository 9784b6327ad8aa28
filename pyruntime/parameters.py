# SPDX-License-Identifier: Apache-2.0
"""Models as collections of arrays: equal before training, their gradients averaged in each step.

A collection is an array, or a dict or list of collections; adapters say whose arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

from farandole.arrays.kinds import kind_of
from farandole.calls.door import collective_then
from farandole.calls.handles import Handle
from farandole.calls.requests import Op
from farandole.objects import allgather_object
from farandole.ops import broadcast_async_, grouped_allreduce_
from farandole.process_sets import ProcessSet, global_process_set

__all__ = [
    "PARAMETERS",
    "agree_on_parameters",
    "average_gradients",
    "broadcast_parameters",
    "items",
    "root_in",
    "wait_for_all",
]

PARAMETERS = "broadcast_parameters"  # where ranks meet in it, unless a name is given


def items(arrays: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, array) in an order that is the same on all ranks: dicts by key, lists by position.

    The name is the way to it, "encoder.weights.0".
    """
    if not isinstance(arrays, (Mapping, list, tuple)):
        yield name, arrays
        return
    members: Iterable[tuple[Any, Any]] = enumerate(arrays)
    if isinstance(arrays, Mapping):
        members = sorted(arrays.items(), key=lambda member: str(member[0]))
    for key, value in members:
        yield from items(value, f"{name}.{key}" if name else str(key))


def root_in(root_rank: int, process_set: ProcessSet) -> int:
    """The root as an int. Raises ValueError where it is no member of the set."""
    members = process_set.ranks or []
    if index(root_rank) not in members:
        raise ValueError(f"root_rank is {root_rank}: pass a member of the process set, {members}")
    return index(root_rank)


def agree_on_parameters(
    names: Sequence[str], root_rank: int, call: str, process_set: ProcessSet
) -> None:
    """Raises ValueError on all ranks where they have different names or roots; collective."""
    told = allgather_object((list(names), root_rank), name=call, process_set=process_set)
    for place, (theirs, root) in enumerate(told):
        first, first_root = told[0]
        who = f"members 0 and {place} of the process set"
        if root != first_root:
            raise ValueError(f"root_rank is {first_root} and {root} on {who}: pass the same")
        if theirs != first:
            different = sorted(set(theirs) ^ set(first)) or "their order"
            raise ValueError(f"params: ranks have different parameters: {different}, {who}")


def wait_for_all(handles: Sequence[Handle[Any]]) -> None:
    """Waits for all, also where some fail: their names are free then. Raises the first failure."""
    failure: Exception | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as reason:
            failure = failure or reason
    if failure is not None:
        raise failure


@collective_then(Op.ALLREDUCE)
def average_gradients(
    grads: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], None]:
    """Replaces each gradient by its mean over the ranks, in place and all together.

    `grads`: a dict or list, nested at will, of float arrays, the same names and shapes on all
    ranks. Raises as farandole.grouped_allreduce_ does.
    """
    arrays = [array for _, array in items(grads)]

    def meet() -> None:
        grouped_allreduce_(arrays, name=name, process_set=process_set)

    return meet


@collective_then(Op.ALLGATHER, unnamed=PARAMETERS)
def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
) -> Callable[[], None]:
    """Overwrites each array with the root's values, in place; any dtypes and shapes.

    `params`: a dict or list of arrays, nested at will. `name`: for calls from several threads.
    Raises on all ranks, whichever has them: TypeError for members that are no arrays, ValueError
    for arrays that cannot be written in place, for different names and roots, MismatchError for
    different shapes and dtypes.
    """
    root, pairs = root_in(root_rank, process_set), list(items(params))
    for way, array in pairs:
        try:
            kind_of(array).describe(array, in_place=True)
        except (TypeError, ValueError) as reason:
            raise type(reason)(f"params{f' at {way!r}' if way else ''}: {reason}") from reason
    prefix = "parameter" if name is None else name

    def meet() -> None:
        names = [way for way, _ in pairs]
        agree_on_parameters(names, root, PARAMETERS if name is None else name, process_set)
        wait_for_all(
            [
                broadcast_async_(array, root, name=f"{prefix}.{way}", process_set=process_set)
                for way, array in pairs
            ]
        )

    return meet
