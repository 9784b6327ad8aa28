# SPDX-License-Identifier: Apache-2.0
"""Who waits for the next world of an elastic job, and who is in it. For the Decider."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from farandole.membership.words import JOINS, NOTHING, Commit, End, Rank, World


class Record(NamedTuple):
    """What has been decided."""

    world: World = World()  # the newest
    done: int = 0  # calls of elastic training that have ended on all its ranks


def is_away(rank: Rank, record: Record) -> bool:
    """Whether it waits. One whose call has ended on all ranks goes on by itself."""
    return rank.standing.away and not 0 < rank.standing.finished <= record.done


def is_here(rank: Rank, record: Record) -> bool:
    """Whether it waits for the next world, and will not enter the present one."""
    standing, number = rank.standing, record.world.number
    return is_away(rank, record) and number in (standing.world, min(standing.over, number))


def is_new(rank: Rank, record: Record) -> bool:
    """Whether it shall join, has not come yet, and was in no world: nobody waits for it."""
    never = rank.standing.world == 0 and rank.name not in record.world.members
    return rank.name.endswith(JOINS) and never and not rank.standing.away


def names_hanging(here: Sequence[Rank], world: World) -> set[str]:
    """Members that wait and never entered the world, where others have waited in it too long."""
    if not any(x.standing.stalled and x.standing.world == world.number for x in here):
        return set()
    return {x.name for x in here if x.name in world.members and x.standing.world < world.number}


def is_broken(all_: Sequence[Rank], record: Record) -> bool:
    """Whether a member of the present world is lost, or has left it by a failure."""
    members = [rank for rank in all_ if rank.name in record.world.members]
    left = [x.standing for x in members if x.standing.away]
    left = [standing for standing in left if standing.world == record.world.number]
    failed = any(not (standing.finished or standing.met) for standing in left)
    return failed or any(rank.end is End.LOST for rank in members)


def ended_well(rank: Rank, record: Record) -> bool:
    """Whether it has; one that was lost with its host had said so, when training had ended. (Of one
    that was lost alone there is an exit code.)"""
    late = rank.end is End.LOST and not rank.code and record.done > 0
    return rank.end is End.WELL or (late and rank.said is End.WELL)


def has_ended(here: Sequence[Rank], world: World) -> bool:
    """Whether all members have finished a call of training."""
    done = {x.name for x in here if x.standing.finished and x.standing.world == world.number}
    return bool(world.members) and done.issuperset(world.members)


def choose(
    here: Sequence[Rank], record: Record, newest: bool, unwanted: Collection[str]
) -> tuple[list[Rank], list[Rank]]:
    """Which of the waiting ranks may be in the next world, and which are to be ended, so that they
    start again. `newest`: some have a commit of the present world. `unwanted`: ranks without a
    slot.
    """
    held = [rank for rank in here if rank.standing.commit != NOTHING]
    if newest and record.done:
        return held, []  # the others would begin with a call that has ended
    joining = [rank for rank in here if rank.name.endswith(JOINS)]
    if not held and 0 < len(joining) < len(here):
        return [], joining  # they have left init() alone, where the others meet
    start = max((rank.standing.commit for rank in here), default=NOTHING)
    kept = [rank for rank in here if rank.name not in unwanted]
    has_state = start == NOTHING or any(rank.standing.commit == start for rank in kept)
    return kept if has_state else list(here), []


def next_world(before: World, chosen: Sequence[Rank], disk: Commit, most: int) -> World:
    """The world of those: first the ones that have the newest commit, and in the old order. `disk`:
    the commit there, which counts if it is newer. An earlier command may have made it: the new
    world's number is greater than those of its worlds."""
    places = {name: place for place, name in enumerate(before.members)}
    start = max(rank.standing.commit for rank in chosen)

    def order(rank: Rank) -> tuple[bool, int, str]:
        return rank.standing.commit != start, places.get(rank.name, len(places)), rank.name

    members = tuple(rank.name for rank in sorted(chosen, key=order)[:most])
    number = max(before.number, disk.world) + 1
    return World(number, members, max(start, disk), disk > start)
