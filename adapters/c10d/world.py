# SPDX-License-Identifier: Apache-2.0
"""Creates the process groups of torch.distributed, each over its own process set."""

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

_LONGEST_START = 600.0  # in seconds; c10d's own limit is half an hour

_WORLDS = "init_process_group"
# Number of groups per label since init(). The key _WORLDS counts world groups.
_made: Counter[str] = Counter()
on_restart(_made.clear)
_first = 0  # c10d's number of the world group, which is above 0 if an earlier attempt has failed


def create(options: Any) -> FarandoleGroup:
    """Creates a group. init_process_group and new_group call it on every member.

    Raises ValueError if c10d's ranks are not farandole's, and MismatchError if members disagree
    about the membership. After the timeout, raises StallError with the missing ranks.
    """
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        _enter(options)
        ranks = list(range(options.group_size))
    elif not topology.is_initialized():
        raise ValueError(
            "new_group(backend='farandole'): the default backend is a different one, so call "
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
    warn(
        "ignite's auto_model() wraps models for the backends nccl, gloo and mpi only. Over "
        "farandole it returns the model unwrapped, so each rank would train its own. Remedy: wrap "
        "it in torch.nn.parallel.DistributedDataParallel instead of auto_model()",
        RuntimeWarning,
    )


def form(ranks: list[int], label: str, timeout: timedelta, store: Any) -> FarandoleGroup:
    """Creates a group of these ranks of the world. All of them pass the same unused label."""
    members = form_process_set(ranks, label, timeout.total_seconds())
    return FarandoleGroup(members, label, timeout, store)


def split(group: FarandoleGroup, ranks: list[int], name: str, timeout: timedelta) -> Any:
    """Creates a group of some ranks of `group`. Returns None on ranks that are not among them."""
    world = sorted(group.ranks[rank] for rank in ranks)
    if topology.rank() not in world:
        return None
    return form(world, _label(name, world), timeout, group.get_group_store())


def _label(name: str, ranks: list[int], whole: bool = False) -> str:
    """Returns the group's name in errors and in the core.

    The name is equal on all members, and is never used twice.
    """
    global _first
    if whole:
        _first = int(name) if name.isdecimal() else 0
    if not name.isdecimal():  # the name is c10d's hash, which may differ between members
        label = f"torch.distributed group of ranks {ranks}"
    else:  # two groups may have the same number if they share no rank
        label = f"torch.distributed group '{int(name) - _first}'"
        label += f" led by rank {ranks[0]}" * (ranks[0] > 0)
    if _made[_WORLDS] > 1:
        label += f" of init_process_group number {_made[_WORLDS]}"
    _made[label] += 1  # c10d reuses names after a group was destroyed
    return label if _made[label] == 1 else f"{label}, again {_made[label]}"


def _enter(options: Any) -> None:
    """Calls init() over the launcher or over c10d's store, if farandole is not running yet."""
    if topology.is_initialized():
        return
    meeting = None
    if _meets_in_store(options.group_size):
        seconds = min(options.timeout.total_seconds(), _LONGEST_START)
        store = _without_names_of_attempts(options.store)
        meeting = StoreBootstrap(store, options.group_rank, options.group_size, seconds)
    runtime.init(meeting)


def _meets_in_store(size: int) -> bool:
    """Returns True if the ranks meet in the store that init_process_group() got.

    They do so if no launcher has started them, or if a launcher has started only their parent, as
    `srun -n1` does.
    """
    if not has_launcher():
        return size > 1
    if os.environ.get("FARANDOLE_RENDEZVOUS") or AGENT in os.environ:
        return False
    known = launchers.launcher().size
    if parent_process() is None:
        return known == 1 < size
    # The launcher may have started only this process's parent.
    return known == 1 or known != size


def _without_names_of_attempts(store: Any) -> Any:
    """Removes c10d's two prefixes, the device and the group number, from the store's keys.

    The group number counts attempts, so it would differ if only some ranks have failed and try
    again.
    """
    for _ in range(2):
        store = getattr(store, "underlying_store", store)
    return store


def _check(ranks: list[int], place: int, whole: bool) -> None:
    """Raises ValueError if c10d's ranks are not farandole's.

    `place` is this rank's index in `ranks`. If `whole` is True, the group must have all ranks of
    the job.
    """
    own, size = topology.rank(), topology.size()
    if ranks != sorted(ranks):
        raise ValueError(f"ranks of a group must be in ascending order: {ranks}")
    if ranks[-1] >= size or ranks[place] != own or (whole and len(ranks) != size):
        raise ValueError(
            f"this process is rank {ranks[place]} in torch.distributed, in a group of {ranks}, but "
            f"in farandole it is rank {own} of {size}. Remedy: start all ranks with one launcher, "
            "or call farandole.shutdown() before init_process_group"
        )
