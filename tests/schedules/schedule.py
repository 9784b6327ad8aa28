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
AGENT, HOST, LAUNCHER, SUPERVISOR, WIRE = "an agent", "host 1", "launcher", "supervisor", "wire"


class Kind(Enum):
    """How a job is started, and what it survives."""

    FORK = "fork"  # without a launcher; any error ends it
    MPIRUN = "mpirun"  # on one host; MPI ends all ranks after a death
    HOSTS = "hosts"  # mpirun --with-ft ulfm on two hosts joined by a wire; any error ends it
    ELASTIC = "elastic"  # farandole run --elastic on one host: training goes on after errors
    ELASTIC_HOSTS = "elastic_hosts"  # the same on two or three hosts joined by a wire

    @property
    def elastic(self) -> bool:
        """Whether training survives errors, and there are a supervisor and agents."""
        return self in (Kind.ELASTIC, Kind.ELASTIC_HOSTS)

    @property
    def wired(self) -> bool:
        """Whether there are hosts, and a wire between them."""
        return self in (Kind.HOSTS, Kind.ELASTIC_HOSTS)


KINDS = tuple(Kind)


class Act(Enum):
    """What is done to a process, or to the wire."""

    KILL = "killed"
    STOP = "stopped"
    HANG = "hangs"  # in a loop of Python, which no signal but SIGKILL ends soon
    TERM = "asked to leave"  # as by a preemption
    POWER = "without power"
    WEATHER = "weather"


@dataclass(frozen=True)
class Fault:
    """One thing that happens."""

    step: int  # that `whom`, or rank 0, has told; BEGIN, or STEPS at the end
    after: float  # seconds from then on
    act: Act
    whom: int | str  # a rank, or AGENT, HOST, LAUNCHER, SUPERVISOR, WIRE
    lasts: float | None = None  # seconds, of a killed supervisor until the next; None: for ever
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
    least: int  # ranks with which an elastic job goes on
    every: float  # seconds between its commits on the disk
    faults: tuple[Fault, ...]  # in the order in which they happen

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return sum(self.hosts)

    @property
    def must_finish(self) -> bool:
        """Whether an error would be wrong: the job survives all that happens to it."""
        return self.kind.elastic or not any(fault.ends_ranks for fault in self.faults)

    def __str__(self) -> str:
        where = "+".join(map(str, self.hosts))
        head = f"seed {self.seed}: {self.kind.value}, {where} ranks, {self.elements} elements"
        if self.kind.elastic:
            head += f", goes on with {self.least}, on the disk every {self.every:g} s"
        return "\n  ".join([head, *map(str, self.faults)])


_HOSTS = ((1, 1), (2, 1), (1, 2), (2, 2))
_THREE = ((1, 1, 1), (2, 1, 1))
_ELEMENTS = (5, 3_000, 20_000)  # by control alone between hosts, by one chunk, by several


def draw(seed: int) -> Schedule:
    """The schedule of a seed; the kinds take turns."""
    random_ = random.Random(f"schedule {seed}")
    kind = KINDS[seed % len(KINDS)]
    some = _HOSTS + _THREE * (kind is Kind.ELASTIC_HOSTS)
    hosts = random_.choice(some) if kind.wired else (random_.randint(2, 4),)
    ranks, elements = sum(hosts), random_.choice(_ELEMENTS)
    count = random_.choice((1, 1, 2) if kind.wired else (1, 1, 2, 2, 3))
    drawn = [_fault(random_, kind, ranks) for _ in range(count)]
    if kind.wired:  # some weather before all else
        first = _weather(random_, kind, len(hosts))
        drawn.insert(0, replace(first, step=min(fault.step for fault in [first, *drawn])))
    drawn.sort(key=lambda fault: fault.step)
    if kind.elastic and random_.random() < 0.6:  # together with the last, or in the recovery
        after = random_.choice((0.0, random_.uniform(0.0, 1.0)))
        more = _fault(random_, kind, ranks)
        drawn.append(replace(more, step=drawn[-1].step, after=after, free=drawn[-1].free))
    kept = _possible(drawn, kind)
    least, every = random_.choice((1, ranks)), random_.choice((0.0, 10.0))
    return Schedule(seed, kind, hosts, elements, least, every, kept)


def _possible(faults: list[Fault], kind: Kind) -> tuple[Fault, ...]:
    """Those that can happen: in a job that survives nothing, none after one that ends it."""
    ends = [number for number, fault in enumerate(faults) if fault.ends_ranks]
    return tuple(faults if kind.elastic or not ends else faults[: ends[0] + 1])


def _fault(random_: random.Random, kind: Kind, ranks: int) -> Fault:
    others = {Kind.MPIRUN: [LAUNCHER], Kind.ELASTIC: [AGENT, SUPERVISOR]}
    others[Kind.ELASTIC_HOSTS] = [AGENT, SUPERVISOR, HOST]
    all_: list[int | str] = [*others.get(kind, []), *[random_.randrange(ranks)] * 3]
    whom = random_.choice(all_)
    acts = [Act.KILL, Act.KILL, Act.STOP, Act.STOP]
    if isinstance(whom, int):
        acts += [Act.HANG, *[Act.TERM] * kind.elastic]
    act = Act.POWER if whom == HOST else random_.choice(acts)
    # A person who stops what has started ranks lets it go on, or ends it.
    brief = act is Act.STOP and (isinstance(whom, str) or random_.random() < 0.5)
    brief |= act is Act.POWER or (act is Act.KILL and whom == SUPERVISOR)
    step, after, free = _moment(random_)
    lasts = random_.uniform(0.1, 0.8)
    if whom == SUPERVISOR and act is Act.KILL and random_.random() < 0.2:
        lasts = 20.0  # by then all have ended
    return Fault(step, after, act, whom, lasts if brief else None, free)


def _moment(random_: random.Random) -> tuple[int, float, bool]:
    """(step, after, free) of a fault."""
    step = random_.choice([BEGIN, STEPS, *range(STEPS), *range(STEPS)])
    most = 0.5 if step == BEGIN else 0.02
    free = step in (BEGIN, STEPS) or random_.random() < 0.5
    return step, random_.uniform(0.0, most), free


def _weather(random_: random.Random, kind: Kind, hosts: int) -> Fault:
    """Of the wire: light from the beginning on, or hard for a time, or a cut."""
    what = random_.choice(("light", "hard", "cut", "cut"))
    step, after, free = _moment(random_)
    if what == "cut":
        all_ = range(hosts + kind.elastic)  # the last one is the supervisor's
        others = [x for x in all_ if x != 1]
        if random_.random() < 0.5:
            others = [0]
        into, out = [(x, 1) for x in others], [(1, x) for x in others]
        pairs = tuple(random_.choice((into, out, into + out)))
        # An elastic job needs these hosts again: they must come back.
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
