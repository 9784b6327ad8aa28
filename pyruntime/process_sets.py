# SPDX-License-Identifier: Apache-2.0
"""Public calls that add and remove process sets, which are subsets of ranks that communicate among
themselves. The calls may be made from any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from farandole import topology
from farandole.arrays.buffers import Buffer
from farandole.calls import prepared
from farandole.calls.handles import Handle, value_of
from farandole.calls.public_call import collective, then
from farandole.calls.requests import NOTHING, Call, Op, allow_threads, submit
from farandole.errors import FarandoleError, MismatchError
from farandole.members import ProcessSet, global_process_set, members_of, registered
from farandole.objects import allgather_object

__all__ = [
    "ProcessSet",
    "add_process_set",
    "disband_process_set",
    "form_process_set",
    "global_process_set",
    "remove_process_set",
]

# Calls that add and remove sets have names, so any thread may make them.
_ADDING, _REMOVING = "add_process_set", "remove_process_set"
# Holds one function, which know_communicators() sets.
_ranks_of: list[Callable[[Any], list[int]]] = []


@collective(Op.ADD_SET, unnamed=_ADDING)
def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set and returns it. Every rank of the world must call this with the same
    ranks.

    `process_set` is a ProcessSet or the ranks of a new one. Sets made from mpi4py communicators may
    differ between ranks, as after Comm.Split. Each rank then registers its own set. All ranks raise
    ValueError if a set with these ranks exists, MismatchError if ranks disagree, and TypeError if a
    rank passes anything else.

    Examples:
        >>> if hvd.size() > 2:  # a set of all ranks is there already: global_process_set
        ...     pair = hvd.add_process_set([0, 1])
        ...     if pair.included():
        ...         hvd.allreduce_(np.ones(2), process_set=pair)
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if new.process_set_id is not None:
        raise ValueError(f"{new} is registered already: remove it first, or use it as it is")
    own = new._members() if new.mpi_comm is None else _ranks_of[0](new.mpi_comm)

    def meet() -> ProcessSet:
        _register(new, own, _add(own) if new.mpi_comm is None else _add_split(own))
        return new

    return then(meet)


def know_communicators(ranks_of: Callable[[Any], list[int]]) -> None:
    """Sets the function that returns a communicator's world ranks. The runtime calls this."""
    _ranks_of[:] = [ranks_of]


def _add(ranks: list[int]) -> int:
    shape = Buffer(0, 0, tuple(ranks), None)
    what = f"add_process_set({ranks})"
    return Handle(submit(Call(Op.ADD_SET, _ADDING), [shape]), _value, what).wait()


def _add_split(own: list[int]) -> int:
    """Adds the sets of all ranks. Returns the number of the set whose members are `own`. If a set
    cannot be added, all ranks get the same error, and remove the sets that they have added."""
    found = {tuple(ranks) for ranks in allgather_object(own, name=_ADDING) if ranks}
    numbers: dict[tuple[int, ...], int] = {}
    try:
        for ranks in sorted(found):
            numbers[ranks] = _add(list(ranks))
    except Exception:
        with contextlib.suppress(FarandoleError):  # the job has failed
            for number in numbers.values():
                _remove(number)
        raise
    return numbers[tuple(own)]


def _register(process_set: ProcessSet, ranks: list[int], number: int) -> None:
    """Gives a set its number. First lists the set, so that forget_all() finds each set that has a
    number, even if a signal handler raises here."""
    registered.append(process_set)
    process_set.ranks = ranks
    process_set.process_set_id = number


@collective(Op.REMOVE_SET, unnamed=_REMOVING)
def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set. Every rank of the world must call this. Returns True, or False if
    `process_set` is the world or is not registered.

    `process_set` is a set that add_process_set returned. Raises MismatchError if ranks pass
    different sets, and TypeError for a value of another type.

    Examples:
        >>> hvd.remove_process_set(hvd.global_process_set)
        False
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set is {process_set!r}, of type {type(process_set).__name__}: pass the "
            "ProcessSet that add_process_set returned"
        )
    number = process_set.process_set_id or 0

    def meet() -> bool:
        if number == 0:
            return _remove_nothing()
        _remove(number)
        process_set.process_set_id = None
        registered.remove(process_set)
        prepared.clear()
        return True

    return then(meet)


def _remove(number: int) -> None:
    call = Call(Op.REMOVE_SET, _REMOVING, root=number)
    Handle(submit(call, [NOTHING]), _value, f"remove_process_set({number})").wait()


def _remove_nothing() -> bool:
    """Makes a barrier, so that all ranks get an error if other ranks remove a set."""
    if topology.is_initialized():
        call = Call(Op.BARRIER, _REMOVING)
        Handle(submit(call, [NOTHING]), lambda _: None, "remove_process_set").wait()
    return False


def form_process_set(ranks: list[int], name: str, timeout: float) -> ProcessSet:
    """Creates and returns a set. Only its members call this. Used by adapters for other APIs.

    `name` must be new and equal on all members. Unlike other sets, this one may have the same ranks
    as an existing set, and any thread may make unnamed calls in it. Raises MismatchError on all
    members if they pass different ranks. Raises StallError, which names the missing ranks, after
    `timeout` seconds.
    """
    new = ProcessSet(ranks)
    shape = Buffer(0, 0, tuple(new._members()), None)
    handle = Handle(submit(Call(Op.ADD_SET, name, by_members=True), [shape]), _value, name, timeout)
    number = handle.wait()
    if members_of(number) != new.ranks:
        raise MismatchError(
            f"{name}: this rank passes ranks {new.ranks}, the others pass {members_of(number)}"
        )
    allow_threads(number)
    _register(new, new._members(), number)
    return new


def disband_process_set(process_set: ProcessSet, name: str) -> None:
    """Releases this rank's use of a set that form_process_set made. Does not wait.

    The core destroys the set once every member has called this. `name` must be new and equal on all
    members. Does nothing after shutdown().
    """
    number, process_set.process_set_id = process_set.process_set_id, None
    if number is None or not topology.is_initialized():
        return
    registered.remove(process_set)
    shape = Buffer(0, 0, tuple(process_set._members()), None)
    call = Call(Op.REMOVE_SET, name, root=number, by_members=True)
    with contextlib.suppress(FarandoleError):  # the job has ended
        Handle(submit(call, [shape]), _value, name)
    prepared.clear()


def forget_all() -> None:
    """Unregisters every set. shutdown() calls this."""
    while registered:
        registered.pop().process_set_id = None
    prepared.clear()


def _value(numbers: Any) -> int:
    return value_of(numbers[0])
