# SPDX-License-Identifier: Apache-2.0
"""Makes the process groups of torch.distributed: a process set for each."""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import timedelta
from multiprocessing import parent_process
from typing import Any

from farandole import runtime, topology
from farandole.c10d.group import FarandoleGroup
from farandole.c10d.meeting import StoreBootstrap, has_launcher
from farandole.calls.requests import Call, Op, on_restart, refuse
from farandole.errors import warn
from farandole.process_sets import form_process_set
from farandole.start import launchers
from farandole.start.agent_client import AGENT

__all__ = ["create", "split"]

_LONGEST_START = 600.0  # seconds; c10d's own limit is half an hour

_WORLDS = "init_process_group"
_made: Counter[str] = Counter()  # groups of each name, and how many worlds, since init()
on_restart(_made.clear)
_first = 0  # c10d's number of the world: higher where init_process_group has failed before


def create(options: Any) -> FarandoleGroup:
    """What init_process_group and new_group call, on the members; `options` are c10d's.

    Raises ValueError where c10d's ranks are not farandole's, MismatchError where members differ
    about who the others are, StallError naming those that do not come before the timeout.
    """
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        _enter(options)
        ranks = list(range(options.group_size))
    elif not topology.is_initialized():
        raise ValueError(
            "new_group(backend='farandole') and a different default backend: call "
            "farandole.init() on every rank first"
        )
    whole = not options.global_ranks_in_group
    several = whole and options.group_size > 1
    if several and options.group_rank == 0 and "ignite.distributed" in sys.modules:
        _warn_of_ignite()
    _made[_WORLDS] += whole
    label = _label(options.group_id, ranks, whole)
    try:
        _check(ranks, options.group_rank, whole)
    except ValueError as reason:
        refuse(Call(Op.ADD_SET, label, by_members=True), reason, ranks)
        raise
    return form(ranks, label, options.timeout, options.store)


def _warn_of_ignite() -> None:
    """It lists backends by name; a model that it leaves as it is would train alone, in silence."""
    warn(
        "ignite's auto_model() wraps models for the backends nccl, gloo and mpi only, and returns "
        "others as they are: each rank would train its own model. Remedy: wrap it in "
        "torch.nn.parallel.DistributedDataParallel, not by auto_model()",
        RuntimeWarning,
    )


def form(ranks: list[int], label: str, timeout: timedelta, store: Any) -> FarandoleGroup:
    """A group of these ranks of the world; all of them make it, under its own label."""
    members = form_process_set(ranks, label, timeout.total_seconds())
    return FarandoleGroup(members, label, timeout, store)


def split(group: FarandoleGroup, ranks: list[int], name: str, timeout: timedelta) -> Any:
    """A group of these ranks of `group`; None on the others."""
    world = sorted(group.ranks[rank] for rank in ranks)
    if topology.rank() not in world:
        return None
    return form(world, _label(name, world), timeout, group.get_group_store())


def _label(name: str, ranks: list[int], whole: bool = False) -> str:
    """How errors name a group, and the core: equal on its members, and never used twice."""
    global _first
    if whole:
        _first = int(name) if name.isdecimal() else 0
    if not name.isdecimal():  # c10d's hash depends on how many groups a member has
        label = f"torch.distributed group of ranks {ranks}"
    else:  # groups without a common rank may have the same name
        label = f"torch.distributed group '{int(name) - _first}'"
        label += f" led by rank {ranks[0]}" * (ranks[0] > 0)
    if _made[_WORLDS] > 1:
        label += f" of init_process_group number {_made[_WORLDS]}"
    _made[label] += 1  # c10d's own names come again for groups that were destroyed
    return label if _made[label] == 1 else f"{label}, again {_made[label]}"


def _enter(options: Any) -> None:
    """Starts farandole, unless it runs already, by a launcher or by c10d's store."""
    if topology.is_initialized():
        return
    meeting = None
    if _meets_in_store(options.group_size):
        seconds = min(options.timeout.total_seconds(), _LONGEST_START)
        store = _without_names_of_attempts(options.store)
        meeting = StoreBootstrap(store, options.group_rank, options.group_size, seconds)
    runtime.init(meeting)


def _meets_in_store(size: int) -> bool:
    """Whether ranks meet in the store that init_process_group was given: no launcher has started
    them, or it has started one process that starts them, as `srun -n1` does."""
    if not has_launcher():
        return size > 1
    if os.environ.get("FARANDOLE_RENDEZVOUS") or AGENT in os.environ:
        return False
    known = launchers.launcher().size
    if parent_process() is None:
        return known == 1 < size
    return known == 1 or known != size  # the launcher may know this child's parent only


def _without_names_of_attempts(store: Any) -> Any:
    """The store that init_process_group was given. c10d has put the device and the group's number
    before all keys; that number differs where one rank alone has failed and tries again."""
    for _ in range(2):
        store = getattr(store, "underlying_store", store)
    return store


def _check(ranks: list[int], place: int, whole: bool) -> None:
    """`place`: this rank's among them; `whole`: they have to be all of farandole's."""
    own, size = topology.rank(), topology.size()
    if ranks != sorted(ranks):
        raise ValueError(f"farandole's groups have their ranks in ascending order, not {ranks}")
    if ranks[-1] >= size or ranks[place] != own or (whole and len(ranks) != size):
        raise ValueError(
            f"torch.distributed makes this process rank {ranks[place]} of a group of {ranks}, but "
            f"farandole's job has {size} ranks, and this is number {own}: let one launcher start "
            "them, or call farandole.shutdown() before init_process_group"
        )
