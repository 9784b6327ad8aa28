# SPDX-License-Identifier: Apache-2.0
"""Scheduler's rules for an elastic job's next world: who waits for it, and who is a member."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from farandole.membership.messages import JOINS, NOTHING, Commit, End, Worker, World


class Record(NamedTuple):
    """The scheduler's last decision."""

    world: World = World()  # the newest world
    done: int = 0  # number of calls of train() that have ended on all ranks of the world


def is_away(worker: Worker, record: Record) -> bool:
    """Returns True if the process is waiting. A process whose call has ended on all ranks is not
    waiting, because it continues."""
    return worker.state.away and not 0 < worker.state.finished <= record.done


def is_here(worker: Worker, record: Record) -> bool:
    """True if the process waits for the next world and will not enter the present one again."""
    state, number = worker.state, record.world.number
    return is_away(worker, record) and number in (state.world, min(state.over, number))


def is_new(worker: Worker, record: Record) -> bool:
    """Returns True if the process was started to join the job but has not called init() yet. Nobody
    waits for such a process."""
    never = worker.state.world == 0 and worker.name not in record.world.members
    return worker.name.endswith(JOINS) and never and not worker.state.away


def names_hanging(here: Sequence[Worker], world: World) -> set[str]:
    """If a member has reported a stall, returns the names of members that never entered the
    world."""
    if not any(x.state.stalled and x.state.world == world.number for x in here):
        return set()
    return {x.name for x in here if x.name in world.members and x.state.world < world.number}


def is_broken(all_: Sequence[Worker], record: Record) -> bool:
    """True if a member of the present world is lost or has left the world after a failure."""
    members = [worker for worker in all_ if worker.name in record.world.members]
    left = [x.state for x in members if x.state.away]
    left = [state for state in left if state.world == record.world.number]
    failed = any(not (state.finished or state.met) for state in left)
    return failed or any(worker.end is End.LOST for worker in members)


def ended_well(worker: Worker, record: Record) -> bool:
    """Returns True if the process has succeeded. A process that was lost together with its host has
    no exit code. Once training has ended, the announcement that the process made counts instead."""
    late = worker.end is End.LOST and not worker.code and record.done > 0
    return worker.end is End.WELL or (late and worker.announced is End.WELL)


def has_ended(here: Sequence[Worker], world: World) -> bool:
    """Returns True if all members of the world have finished a call of train()."""
    done = {x.name for x in here if x.state.finished and x.state.world == world.number}
    return bool(world.members) and done.issuperset(world.members)


def choose(
    here: Sequence[Worker], record: Record, newest: bool, unwanted: Collection[str]
) -> tuple[list[Worker], list[Worker]]:
    """Returns the waiting processes that may be in the next world, and the processes to restart.

    `newest` is True if some processes have a commit of the present world. `unwanted` holds the
    names of processes for which there is no slot.
    """
    held = [worker for worker in here if worker.state.commit != NOTHING]
    if newest and record.done:
        return held, []  # the others would enter a call that has already ended
    joining = [worker for worker in here if worker.name.endswith(JOINS)]
    if not held and 0 < len(joining) < len(here):
        return [], joining  # these have returned from init(), and the others have not
    start = max((worker.state.commit for worker in here), default=NOTHING)
    kept = [worker for worker in here if worker.name not in unwanted]
    has_state = start == NOTHING or any(worker.state.commit == start for worker in kept)
    return kept if has_state else list(here), []


def next_world(before: World, chosen: Sequence[Worker], disk: Commit, most: int) -> World:
    """Returns a world that consists of the chosen processes. Processes that have the newest commit
    come first; apart from that, processes are ordered by their old ranks. `disk` is the commit on
    the disk, which is used if it is newer. An earlier command may have made that commit, so the new
    world's number is greater than that of the commit's world."""
    places = {name: place for place, name in enumerate(before.members)}
    start = max(worker.state.commit for worker in chosen)

    def order(worker: Worker) -> tuple[bool, int, str]:
        return worker.state.commit != start, places.get(worker.name, len(places)), worker.name

    members = tuple(worker.name for worker in sorted(chosen, key=order)[:most])
    number = max(before.number, disk.world) + 1
    return World(number, members, max(start, disk), disk > start)
