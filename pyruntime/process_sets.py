# SPDX-License-Identifier: Apache-2.0
"""Process sets: subsets of the ranks that reduce among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from farandole import repeats, topology
from farandole._library import check_count, ffi, lib
from farandole.buffers import Buffer
from farandole.handles import Handle, value_of
from farandole.requests import NOTHING, Call, Op, submit

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set", "size_of"]


class ProcessSet:
    """Some ranks of the world, ascending. Usable once add_process_set or init registered it."""

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """From world ranks, or from an mpi4py communicator (after init). Raises ValueError for
        ranks that are no integers, are repeated, or are none."""
        self.process_set_id: int | None = None
        self.mpi_comm = ranks_or_comm if hasattr(ranks_or_comm, "Get_group") else None
        self.ranks: list[int] | None = None
        if self.mpi_comm is None:
            ranks = list(ranks_or_comm)
            if not all(hasattr(rank, "__index__") for rank in ranks):
                raise ValueError(f"a process set holds ranks, not {ranks}")
            self.ranks = sorted(rank.__index__() for rank in ranks)
            if not self.ranks or len(set(ranks)) < len(ranks):
                raise ValueError(f"a process set holds each rank once, and one at least: {ranks}")

    def size(self) -> int | None:
        """Number of members; None before registration."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """This process's place in the set; None before registration. Raises ValueError outside."""
        if self.process_set_id is None:
            return None
        members, own = self._members(), topology.rank()
        if own not in members:
            raise ValueError(f"rank {own} is not in process set {members}")
        return members.index(own)

    def included(self) -> bool | None:
        """Whether this process is a member; None while the ranks are not known."""
        return None if self.ranks is None else topology.rank() in self.ranks

    def _members(self) -> list[int]:
        assert self.ranks is not None  # registration fills it
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _World(ProcessSet):
    """All ranks: always registered, whatever init() finds."""

    def __init__(self) -> None:
        super().__init__([0])
        self.process_set_id = 0
        self.ranks = None

    def _members(self) -> list[int]:
        return list(range(topology.size()))

    def included(self) -> bool | None:
        return True


global_process_set = _World()
_registered: list[ProcessSet] = []


def set_id(process_set: ProcessSet) -> int:
    """The core's number of a set. Raises ValueError for one that is not registered."""
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered: call add_process_set on every rank")
    return process_set.process_set_id


def size_of(number: int) -> int:
    """The number of members of a set, by its number. Raises ValueError for an unknown one."""
    return check_count(lib.farandole_set_ranks(number, ffi.NULL, 0))


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a set; every rank of the world calls this, with the same ranks, and waits.

    Sets from mpi4py communicators may differ between ranks as Comm.Split makes them: each rank
    registers its own. Raises ValueError where the same set exists, MismatchError where ranks
    disagree.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} is registered already")
    if process_set.mpi_comm is None:
        process_set.process_set_id = _add(process_set._members())
    else:
        _add_split(process_set)
    _registered.append(process_set)
    return process_set


def _add(ranks: list[int]) -> int:
    shape = Buffer(0, 0, tuple(ranks), None)
    what = f"add_process_set({ranks})"
    return Handle(submit(Call(Op.ADD_SET), [shape]), _value, what).wait()


def _add_split(process_set: ProcessSet) -> None:
    from farandole.objects import allgather_object
    from farandole.runtime import world_ranks

    own = world_ranks(process_set.mpi_comm)
    for ranks in sorted({tuple(ranks) for ranks in allgather_object(own)}):
        number = _add(list(ranks))
        if list(ranks) == own:
            process_set.ranks, process_set.process_set_id = own, number


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; every rank of the world calls this. False for the world or an unknown set."""
    number = process_set.process_set_id
    if number is None or process_set is global_process_set:
        return False
    call = Call(Op.REMOVE_SET, root=number)
    Handle(submit(call, [NOTHING]), _value, f"remove_process_set({number})").wait()
    process_set.process_set_id = None
    _registered.remove(process_set)
    repeats.clear()
    return True


def forget_all() -> None:
    """Makes every set unregistered. shutdown() calls this."""
    while _registered:
        _registered.pop().process_set_id = None
    repeats.clear()


def _value(numbers: Any) -> int:
    return value_of(numbers[0])
