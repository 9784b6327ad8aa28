# SPDX-License-Identifier: Apache-2.0
"""A schedule: one job, and what happens to it when; drawn from a seed, and nothing else.

A moment is a place in the training, which a rank tells, and a few milliseconds more. So a schedule
falls on the same place whenever it is repeated, however fast the machine is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from harness.wire import Weather
from schedules.training import STEPS

__all__ = ["BEGIN", "KINDS", "Act", "Fault", "Kind", "Schedule", "draw"]

BEGIN = -1  # the step that a rank is at before init()
FAIR = Weather()
LAUNCHER, SUPERVISOR, WIRE = "launcher", "supervisor", "wire"


class Kind(Enum):
    """How a job is started, and what it survives."""

    FORK = "fork"  # without a launcher; any error ends it
    MPIRUN = "mpirun"  # on one host; MPI ends all ranks after a death
    HOSTS = "hosts"  # mpirun --with-ft ulfm on two hosts joined by a wire; any error ends it
    WORLDS = "worlds"  # the same on one host; training goes on with the ranks that live
    SUPERVISED = "supervised"  # farandole run --elastic on one host: started anew after errors
    SUPERVISED_HOSTS = "supervised_hosts"  # the same on two hosts joined by a wire

    @property
    def elastic(self) -> bool:
        """Whether training survives errors."""
        return self in (Kind.WORLDS, Kind.SUPERVISED, Kind.SUPERVISED_HOSTS)

    @property
    def supervised(self) -> bool:
        """Whether there is a supervisor."""
        return self in (Kind.SUPERVISED, Kind.SUPERVISED_HOSTS)

    @property
    def wired(self) -> bool:
        """Whether there are hosts, and a wire between them."""
        return self in (Kind.HOSTS, Kind.SUPERVISED_HOSTS)


KINDS = tuple(Kind)


class Act(Enum):
    """What is done to a process, or to the wire."""

    KILL = "killed"
    STOP = "stopped"
    HANG = "hangs"  # in a loop of Python, which no signal but SIGKILL ends soon
    WEATHER = "weather"


@dataclass(frozen=True)
class Fault:
    """One thing that happens."""

    step: int  # that `whom`, or rank 0, has told; BEGIN, or STEPS at the end
    after: float  # seconds from then on
    act: Act
    whom: int | str  # a rank, or LAUNCHER, SUPERVISOR, WIRE
    lasts: float | None = None  # seconds; None: for ever
    free: bool = False  # ranks do not wait for it, so that it may fall into what follows the step
    weather: Weather = FAIR

    @property
    def ends_ranks(self) -> bool:
        """Whether a job that survives nothing may end by it."""
        if self.act is Act.WEATHER:
            return bool(self.weather.cut) and self.lasts is None
        return self.act is not Act.STOP or self.lasts is None

    def __str__(self) -> str:
        where = {BEGIN: "before init()", STEPS: "at the end"}.get(self.step, f"at step {self.step}")
        whom = f"rank {self.whom}" if isinstance(self.whom, int) else self.whom
        what = f"{self.act.value}: {self.weather}" if self.whom == WIRE else self.act.value
        lasts = "" if self.lasts is None else f" for {self.lasts:.2f} s"
        freely = ", all go on" if self.free else ""
        return f"{where} + {1000 * self.after:.1f} ms{freely}: {whom} {what}{lasts}"


@dataclass(frozen=True)
class Schedule:
    """One job."""

    seed: int
    kind: Kind
    hosts: tuple[int, ...]  # ranks on each
    elements: int
    faults: tuple[Fault, ...]  # in the order in which they happen

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return sum(self.hosts)

    @property
    def must_finish(self) -> bool:
        """Whether an error would be wrong: the job survives all that happens to it."""
        kill = Act.KILL
        if self.kind is Kind.WORLDS:  # it names a rank that does not come back, and ends
            return all(not fault.ends_ranks or fault.act is kill for fault in self.faults)
        return self.kind.supervised or not any(fault.ends_ranks for fault in self.faults)

    def __str__(self) -> str:
        where = "+".join(map(str, self.hosts))
        head = f"seed {self.seed}: {self.kind.value}, {where} ranks, {self.elements} elements"
        return "\n  ".join([head, *map(str, self.faults)])


_HOSTS = ((1, 1), (2, 1), (1, 2), (2, 2))
_ELEMENTS = (5, 3_000, 20_000)  # by control alone between hosts, by one chunk, by several


def draw(seed: int) -> Schedule:
    """The schedule of a seed; the kinds take turns."""
    random_ = random.Random(f"schedule {seed}")
    kind = KINDS[seed % len(KINDS)]
    hosts = random_.choice(_HOSTS) if kind.wired else (random_.randint(2, 4),)
    elements = random_.choice(_ELEMENTS)
    count = random_.choice((1, 1, 2) if kind.wired else (1, 1, 2, 2, 3))
    drawn = [_fault(random_, kind, sum(hosts)) for _ in range(count)]
    if kind.wired:  # some weather before all else
        first = _weather(random_, kind)
        drawn.insert(0, replace(first, step=min(fault.step for fault in [first, *drawn])))
    drawn.sort(key=lambda fault: fault.step)
    return Schedule(seed, kind, hosts, elements, _possible(drawn, kind, sum(hosts)))


def _possible(faults: list[Fault], kind: Kind, ranks: int) -> tuple[Fault, ...]:
    """Those that can happen after what has happened before."""
    kept: list[Fault] = []
    ended: set[int | str] = set()  # and not started anew
    for fault in faults:
        over = fault.act is Act.KILL and fault.whom == SUPERVISOR
        if not kind.supervised and fault.whom in ended:
            continue
        # Somebody must have the state, and a rank that has died before init() is no member.
        if kind is Kind.WORLDS and fault.ends_ranks:
            if len(ended) + 1 >= ranks or fault.step == BEGIN:
                continue
            over |= fault.act is not Act.KILL
        kept.append(fault)
        if fault.ends_ranks:
            ended.add(fault.whom)
        if over or (fault.ends_ranks and not kind.elastic):
            break
    return tuple(kept)


def _fault(random_: random.Random, kind: Kind, ranks: int) -> Fault:
    others: dict[Kind, list[str]] = {
        Kind.FORK: [],
        Kind.MPIRUN: [LAUNCHER],
        Kind.HOSTS: [],
        Kind.WORLDS: [],
        Kind.SUPERVISED: [LAUNCHER, LAUNCHER, SUPERVISOR],
        Kind.SUPERVISED_HOSTS: [LAUNCHER, SUPERVISOR],
    }
    all_: list[int | str] = [*others[kind], *[random_.randrange(ranks)] * 3]
    whom = random_.choice(all_)
    acts = [Act.KILL, Act.KILL, Act.STOP, Act.STOP]
    act = random_.choice([*acts, Act.HANG] if isinstance(whom, int) else acts)
    # A person who stops a launcher goes on, or ends it; a supervisor ends it itself.
    patient = whom == SUPERVISOR or (whom == LAUNCHER and not kind.supervised)
    brief = act is Act.STOP and (patient or random_.random() < 0.5)
    step, after, free = _moment(random_)
    return Fault(step, after, act, whom, random_.uniform(0.1, 0.8) if brief else None, free)


def _moment(random_: random.Random) -> tuple[int, float, bool]:
    """(step, after, free) of a fault."""
    step = random_.choice([BEGIN, STEPS, *range(STEPS), *range(STEPS)])
    most = 0.5 if step == BEGIN else 0.02
    free = step in (BEGIN, STEPS) or random_.random() < 0.5
    return step, random_.uniform(0.0, most), free


def _weather(random_: random.Random, kind: Kind) -> Fault:
    """Of the wire: light from the beginning on, or hard for a time, or a cut."""
    what = random_.choice(("light", "hard", "cut", "cut"))
    step, after, free = _moment(random_)
    if what == "cut":
        pairs = random_.choice((((0, 1),), ((1, 0),), ((0, 1), (1, 0))))
        # A job that is started anew finds the same hosts: they must come back.
        for_ever = not kind.elastic and random_.random() < 0.5
        lasts = None if for_ever else random_.uniform(0.2, 2.0)
        cut = Weather(cut=pairs)
        return Fault(step, after, Act.WEATHER, WIRE, lasts, free, cut)
    scale = 0.03 if what == "light" else 0.2
    most = {"loss": scale, "duplicate": scale, "reorder": scale}
    most |= {"delay": scale / 5, "jitter": scale / 5}
    chosen = random_.sample(sorted(most), random_.randint(1, len(most)))
    values: dict[str, Any] = {name: random_.uniform(0.0, most[name]) for name in chosen}
    weather = Weather(**values)
    if what == "light":
        return Fault(BEGIN, 0.0, Act.WEATHER, WIRE, None, True, weather)
    return Fault(step, after, Act.WEATHER, WIRE, random_.uniform(0.5, 3.0), free, weather)
