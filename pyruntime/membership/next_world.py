# SPDX-License-Identifier: Apache-2.0
"""Rules for the next world of an elastic job: who waits for it, and who is in it. For Scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from farandole.membership.messages import JOINS, NOTHING, Commit, End, Worker, World


class Record(NamedTuple):
    """The scheduler's last decision."""

    world: World = World()  # the newest world
    done: int = 0  # number of calls of train() that have ended on all its ranks


def is_away(worker: Worker, record: Record) -> bool:
    """True if the process waits. It does not if its call has ended on all ranks: it continues."""
    return worker.state.away and not 0 < worker.state.finished <= record.done


def is_here(worker: Worker, record: Record) -> bool:
    """True if the process waits for the next world and will not enter the present one any more."""
    state, number = worker.state, record.world.number
    return is_away(worker, record) and number in (state.world, min(state.over, number))


def is_new(worker: Worker, record: Record) -> bool:
    """True if the process was started to join but is not there yet. Nobody waits for it."""
    never = worker.state.world == 0 and worker.name not in record.world.members
    return worker.name.endswith(JOINS) and never and not worker.state.away


def names_hanging(here: Sequence[Worker], world: World) -> set[str]:
    """Names of members that never entered the world, if another member has reported a stall."""
    if not any(x.state.stalled and x.state.world == world.number for x in here):
        return set()
    return {x.name for x in here if x.name in world.members and x.state.world < world.number}


def is_broken(all_: Sequence[Worker], record: Record) -> bool:
    """True if a member of the present world is lost, or has left the world after a failure."""
    members = [worker for worker in all_ if worker.name in record.world.members]
    left = [x.state for x in members if x.state.away]
    left = [state for state in left if state.world == record.world.number]
    failed = any(not (state.finished or state.met) for state in left)
    return failed or any(worker.end is End.LOST for worker in members)


def ended_well(worker: Worker, record: Record) -> bool:
    """True if the process has succeeded. If it was lost together with its host, there is no exit
    code; then, once training has ended, the process's announcement counts."""
    late = worker.end is End.LOST and not worker.code and record.done > 0
    return worker.end is End.WELL or (late and worker.announced is End.WELL)


def has_ended(here: Sequence[Worker], world: World) -> bool:
    """True if all members of the world have finished a call of train()."""
    done = {x.name for x in here if x.state.finished and x.state.world == world.number}
    return bool(world.members) and done.issuperset(world.members)


def choose(
    here: Sequence[Worker], record: Record, newest: bool, unwanted: Collection[str]
) -> tuple[list[Worker], list[Worker]]:
    """Returns (waiting processes that may be in the next world, processes to restart).

    `newest`: some have a commit of the present world. `unwanted`: names of processes without slot.
    """
    held = [worker for worker in here if worker.state.commit != NOTHING]
    if newest and record.done:
        return held, []  # the others would enter a call that has ended
    joining = [worker for worker in here if worker.name.endswith(JOINS)]
    if not held and 0 < len(joining) < len(here):
        return [], joining  # these have returned from init(), but the others have not
    start = max((worker.state.commit for worker in here), default=NOTHING)
    kept = [worker for worker in here if worker.name not in unwanted]
    has_state = start == NOTHING or any(worker.state.commit == start for worker in kept)
    return kept if has_state else list(here), []


def next_world(before: World, chosen: Sequence[Worker], disk: Commit, most: int) -> World:
    """Returns the world of the chosen processes: those with the newest commit first, then by their
    old ranks. `disk`: the commit on the disk, used if it is newer. An earlier command may have made
    that commit, so the number of the new world exceeds that of the commit's world."""
    places = {name: place for place, name in enumerate(before.members)}
    start = max(worker.state.commit for worker in chosen)

    def order(worker: Worker) -> tuple[bool, int, str]:
        return worker.state.commit != start, places.get(worker.name, len(places)), worker.name

    members = tuple(worker.name for worker in sorted(chosen, key=order)[:most])
    number = max(before.number, disk.world) + 1
    return World(number, members, max(start, disk), disk > start)
