# SPDX-License-Identifier: Apache-2.0
"""How a job must end to which things have happened: with the right numbers, or with errors that say
on every rank what has happened; soon, and with nothing left behind."""

from __future__ import annotations

import re

from harness.process import SLOWNESS
from schedules.outcome import Outcome, Told
from schedules.schedule import HOST, Kind, Schedule
from schedules.training import STEPS, seen, undisturbed

__all__ = ["complaints"]

SOON = 30.0 * SLOWNESS  # seconds: the longest of the limits twice, on a machine that is busy
# What an error tells the reader to do.
_REMEDY = (
    r"remed|see its own output|see the output|kill -CONT|is down|doctor|sets (this limit|how long)"
    r"|drop_last|must call shutdown"
)
# MPI_Init holds the GIL: there the core ends a rank by such a line, and mpirun ends the others.
_ENDED_BY_MPI = (
    r"prterun|mpirun|PRTE|PMIx|signal 9|died|MPI_ABORT|MPI_INIT|in MPI_Init for|left: "
    r"|PeerError: init\(\): rank \d+ ended before coming"
)


def complaints(schedule: Schedule, outcome: Outcome) -> list[str]:
    """What is wrong with how it has ended; empty: nothing."""
    if outcome.hung:
        return [f"it hangs\n{outcome.hung}"]
    wrong = [outcome.left] if outcome.left else []
    wrong += [text for told in outcome.told if (text := _wrong_numbers(schedule, told))]
    if schedule.must_finish:
        return wrong + _unfinished(schedule, outcome)
    for rank in range(schedule.ranks):
        wrong += _wrong_end(schedule, outcome, rank)
    return wrong


def _wrong_numbers(schedule: Schedule, told: Told) -> str:
    if told.what == "error" and not told.words["typed"]:
        return f"rank {told.rank} raised {told.words['type']}: {told.words['text']}"
    if told.what != "done":
        return ""
    if told.words["digest"] != undisturbed(schedule.elements):
        return f"rank {told.rank} has other bits than an undisturbed run"
    if told.words["seen"] != seen():
        return f"rank {told.rank} has counted samples otherwise: {told.words['seen']}"
    return ""


def _unfinished(schedule: Schedule, outcome: Outcome) -> list[str]:
    """Complaints about a job that should have done all its work."""
    done = {told.pid: int(told.words["size"]) for told in outcome.told if told.what == "done"}
    wrong, sizes = [], list(done.values())
    least = schedule.least if schedule.kind.elastic else schedule.ranks
    # One that is stopped for ever, or loses power, when its training has ended can't tell.
    trained = {x.pid for x in outcome.told if x.what == "step" and x.words["step"] == STEPS}
    powerless = any(fault.whom == HOST for fault in schedule.faults)
    late = len((trained if powerless else trained & outcome.victims) - set(done))
    if not any(size >= least and sizes.count(size) + late >= size for size in sizes):
        wrong.append(f"of {schedule.ranks} ranks these have finished: {done}")
    # What is lost when others have ended can't be replaced.
    ends = any(fault.ends_ranks for fault in schedule.faults)
    lost = ends and "after others had succeeded" in outcome.out
    if outcome.code != 0 and not lost and not outcome.victims & set(done):
        wrong.append(f"the exit code is {outcome.code}")
    return wrong


def _wrong_end(schedule: Schedule, outcome: Outcome, rank: int) -> list[str]:
    """Complaints about one rank of a job that may end by an error."""
    told = outcome.of(rank, "begin", "done", "end", "error")
    if not told:
        return [f"rank {rank} has never begun"]
    last = told[-1]
    if last.pid in outcome.victims or last.what in ("done", "end"):
        return []
    if last.what == "begin":  # it has been ended; nobody but a launcher may do so
        by_mpi = schedule.kind is not Kind.FORK and re.search(_ENDED_BY_MPI, outcome.out)
        return [] if by_mpi else [f"rank {rank} ended without a word"]
    wrong = []
    text = last.words["text"]
    late = last.at - outcome.last
    if late > SOON:
        wrong.append(f"rank {rank} heard of it after {late:.1f} s")
    in_mpi = "MPI failed while the ranks met" in text  # it does not tell who has died
    if not in_mpi and not _named(text) & (
        _culprits(schedule) or set(range(schedule.ranks)) - {rank}
    ):
        wrong.append(f"rank {rank}'s error does not name the rank: {text}")
    if not re.search(_REMEDY, text):
        wrong.append(f"rank {rank}'s error names no remedy: {text}")
    return wrong


def _culprits(schedule: Schedule) -> set[int]:
    """The ranks that end the job; none: the launcher or the wire does."""
    ends = [fault.whom for fault in schedule.faults if fault.ends_ranks]
    return {whom for whom in ends if isinstance(whom, int)}


def _named(text: str) -> set[int]:
    """The ranks in a text: `rank 3`, `ranks 0, 2-5`; members of the world are ranks too."""
    found = set[int]()
    for listed in re.findall(
        r"\b(?:rank|member)s? (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)", text
    ):
        for part in re.split(r", | and ", listed):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
