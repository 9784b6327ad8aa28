# SPDX-License-Identifier: Apache-2.0
"""Defines ProcessSet, the ranks that take part in a call. process_sets.py adds and removes sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from farandole import topology
from farandole._library import check_count, ffi, lib


class ProcessSet:
    """A subset of the world's ranks, in ascending order. add_process_set or init registers it."""

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Takes world ranks or, after init(), an mpi4py communicator.

        Raises ValueError for a rank that is not an integer, is repeated, or cannot be in any world.
        """
        self.process_set_id: int | None = None
        self.mpi_comm = ranks_or_comm if hasattr(ranks_or_comm, "Get_group") else None
        self.ranks: list[int] | None = None
        if self.mpi_comm is None:
            try:
                ranks = list(ranks_or_comm)
            except TypeError:
                raise TypeError(
                    f"process set: pass a list of ranks or an mpi4py communicator, not "
                    f"{ranks_or_comm!r} of type {type(ranks_or_comm).__name__}"
                ) from None
            if not all(hasattr(r, "__index__") and not isinstance(r, bool) for r in ranks):
                raise ValueError(f"process set: ranks must be integers, not {ranks}")
            self.ranks = sorted(rank.__index__() for rank in ranks)
            if self.ranks and not 0 <= self.ranks[0] <= self.ranks[-1] < 2**31:
                raise ValueError(f"process set: ranks must be from 0 to size() - 1, not {ranks}")
            if not self.ranks or len(set(ranks)) < len(ranks):
                raise ValueError(
                    f"process set: pass at least one rank, and none twice, not {ranks}"
                )

    def size(self) -> int | None:
        """Returns the number of members, or None before registration."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """Returns this process's rank in the set, or None before registration. Raises ValueError if
        this process is not a member."""
        if self.process_set_id is None:
            return None
        members, own = self._members(), topology.rank()
        if own not in members:
            raise ValueError(f"rank {own} is not in process set {members}")
        return members.index(own)

    def included(self) -> bool | None:
        """Returns True if this process is a member, or None while the ranks are unknown."""
        return None if self.ranks is None else topology.rank() in self.ranks

    def _members(self) -> list[int]:
        assert self.ranks is not None  # registration sets it
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _World(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        return self._members() if topology.is_initialized() else None

    def _members(self) -> list[int]:
        return list(range(topology.size()))

    def included(self) -> bool | None:
        return True


global_process_set = _World()
registered: list[ProcessSet] = []  # does not list the world


def set_id(process_set: ProcessSet) -> int:
    """Returns the core's number for a set. Raises ValueError if the set is not registered."""
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered: call add_process_set on every rank")
    return process_set.process_set_id


def size_of(number: int) -> int:
    """Returns the size of the set that has this number. Raises ValueError if the set is unknown."""
    return check_count(lib.farandole_set_ranks(number, ffi.NULL, 0))


def members_of(number: int) -> list[int]:
    """Returns the world ranks, in ascending order, of the set that has this number. Raises
    ValueError if the set is unknown."""
    ranks = ffi.new("int32_t[]", size_of(number))
    lib.farandole_set_ranks(number, ranks, len(ranks))
    return list(ranks)


def denoted(value: Any) -> list[int]:
    """Returns the numbers of the sets that a wrong argument may mean. Their members get the error.

    `value` may be of any type. If it denotes no set, returns all sets that contain this rank, the
    world first. Never raises.
    """
    try:
        number = getattr(value, "process_set_id", value)
        known = {0: list(range(topology.size()))}
        known |= {s.process_set_id: s.ranks or [] for s in registered if s.process_set_id}
        if isinstance(number, int) and not isinstance(number, bool) and number in known:
            return [number]
        ranks = getattr(value, "ranks", value)
        listed = isinstance(ranks, (list, tuple)) and sorted(ranks)
        meant = [number for number, members in known.items() if members == listed]
    except Exception:
        meant = []
    numbers = (s.process_set_id for s in registered if s.process_set_id and s.included())
    return meant or [0, *numbers]
