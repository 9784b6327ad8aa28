# SPDX-License-Identifier: Apache-2.0
"""Process sets: subsets of the ranks that reduce among themselves; how they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from farandole import topology
from farandole.arrays.buffers import Buffer
from farandole.calls import repeats
from farandole.calls.door import collective_then
from farandole.calls.handles import Handle, value_of
from farandole.calls.requests import NOTHING, Call, Op, submit
from farandole.members import ProcessSet, global_process_set, registered, set_id, size_of

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "remove_process_set",
    "set_id",
    "size_of",
]

# Not among the unnamed calls: any thread may add and remove sets.
_ADDING, _REMOVING = "add_process_set", "remove_process_set"


@collective_then(Op.ADD_SET, unnamed=_ADDING)
def add_process_set(process_set: ProcessSet | Iterable[int]) -> Callable[[], ProcessSet]:
    """Registers a set; every rank of the world calls this, with the same ranks, and waits.

    Sets from mpi4py communicators may differ between ranks as Comm.Split makes them: each rank
    registers its own. Raises ValueError where the same set exists, MismatchError where ranks
    disagree, TypeError for what is no set of ranks: on all ranks where it is so on one.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if new.process_set_id is not None:
        raise ValueError(f"{new} is registered already: remove it first, or use it as it is")
    own = new._members() if new.mpi_comm is None else _members_of(new.mpi_comm)

    def meet() -> ProcessSet:
        if new.mpi_comm is None:
            new.process_set_id = _add(own)
        else:
            _add_split(new, own)
        registered.append(new)
        return new

    return meet


def _members_of(comm: Any) -> list[int]:
    from farandole.runtime import world_ranks

    return world_ranks(comm)


def _add(ranks: list[int]) -> int:
    shape = Buffer(0, 0, tuple(ranks), None)
    what = f"add_process_set({ranks})"
    return Handle(submit(Call(Op.ADD_SET, _ADDING), [shape]), _value, what).wait()


def _add_split(process_set: ProcessSet, own: list[int]) -> None:
    from farandole.objects import allgather_object

    for ranks in sorted({tuple(ranks) for ranks in allgather_object(own, name=_ADDING)}):
        number = _add(list(ranks))
        if list(ranks) == own:
            process_set.ranks, process_set.process_set_id = own, number


@collective_then(Op.REMOVE_SET, unnamed=_REMOVING)
def remove_process_set(process_set: ProcessSet) -> Callable[[], bool]:
    """Removes a set; every rank of the world calls this. False for the world or an unknown set.

    Raises MismatchError where ranks name different sets, TypeError for what is no ProcessSet.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set is {process_set!r}, of type {type(process_set).__name__}: pass what "
            "add_process_set gave"
        )
    number = process_set.process_set_id or 0

    def meet() -> bool:
        if number == 0:
            return _remove_nothing()
        call = Call(Op.REMOVE_SET, _REMOVING, root=number)
        what = f"remove_process_set({number})"
        Handle(submit(call, [NOTHING]), _value, what).wait()
        process_set.process_set_id = None
        registered.remove(process_set)
        repeats.clear()
        return True

    return meet


def _remove_nothing() -> bool:
    """The others hear of it: they would wait if they did name a set."""
    if topology.is_initialized():
        call = Call(Op.BARRIER, _REMOVING)
        Handle(submit(call, [NOTHING]), lambda _: None, "remove_process_set").wait()
    return False


def forget_all() -> None:
    """Makes every set unregistered. shutdown() calls this."""
    while registered:
        registered.pop().process_set_id = None
    repeats.clear()


def _value(numbers: Any) -> int:
    return value_of(numbers[0])
