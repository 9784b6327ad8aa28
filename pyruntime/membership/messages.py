# SPDX-License-Identifier: Apache-2.0
"""The messages between an elastic job's supervisor, agents and ranks, which are sent as JSON."""

from __future__ import annotations

import json
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
JOINS = "+"  # last character in the name of a process that was started to join a running world


class Commit(NamedTuple):
    """Identifies a commit by its number and by the world that made or copied it. A later commit
    compares greater than an earlier one, and every commit of a newer world compares greater than
    all commits of older worlds."""

    world: int
    number: int


NOTHING = Commit(0, 0)  # stands for the state with which a program starts


class World(NamedTuple):
    """A world. `members[r]` is the name of the process that has rank r."""

    number: int = 0  # 0 means no world yet
    members: tuple[str, ...] = ()
    start: Commit = NOTHING  # rank 0 has this commit and sends it to the other ranks
    from_disk: bool = False  # True if rank 0 must first read the commit from the disk


class View(NamedTuple):
    """The state of the job. The supervisor sends it to the ranks through their agents."""

    world: World = World()  # the newest world
    over: int = 0  # worlds up to this number can make no more commits
    broken: int = 0  # in worlds up to this number, waiting calls will fail
    meet: int = 0  # members of this world must meet in the next world after their next commit
    leave: bool = False  # all ranks must end after their next commit, which must be on the disk
    done: int = 0  # number of calls of train() that have ended on all ranks
    lost: bool = False  # True if the supervisor does not answer; the agent sets this


class WorkerState(NamedTuple):
    """The state of a rank. The rank sends it to the supervisor through the host's agent."""

    world: int = 0  # the last world that the rank was in
    # True if the rank waits for the next world. It makes no more calls in the last one.
    away: bool = False
    over: int = 0  # the rank will not enter worlds with numbers up to this one
    commit: Commit = NOTHING  # the newest commit in the rank's memory
    finished: int = 0  # if above 0, the rank is away because this call of train() has ended on it
    met: bool = False  # True if the rank is away because all members agreed to meet
    stalled: bool = False  # True if the rank is away because another rank hangs


class End(Enum):
    """Why a process ended."""

    WELL = "well"  # success
    LEFT = "left"  # the process was asked to leave or its host is preempted; others may continue
    FAILED = "failed"  # the program raised an error that no retry can fix
    LOST = "lost"  # the process was killed, crashed, or raised an error that a retry may avoid


class Worker(NamedTuple):
    """A process of the job, as known to its host's agent."""

    name: str
    state: WorkerState = WorkerState()
    end: End | None = None  # None while the process lives
    text: str = ""  # describes the end
    code: int = 0  # exit code, or -N for signal N
    announced: End | None = None  # the end that the process has announced


class AgentStatus(NamedTuple):
    """The state of a host. Its agent sends this to the supervisor."""

    agent: str  # name of the agent process
    number: int  # rises with each message
    host: str
    slots: int
    workers: tuple[Worker, ...]
    draining: bool = False  # True if the host is being preempted


class Assignment(NamedTuple):
    """The processes that a host must run. The supervisor sends this to the host's agent."""

    number: int  # rises with each message
    heard: int  # number of the newest AgentStatus that the supervisor has received
    workers: tuple[str, ...]  # names; the agent starts missing processes and kills all others
    view: View


# ---- JSON


def encode(message: NamedTuple) -> str:
    """Converts a message of any class in this file to JSON."""
    return json.dumps(message, default=lambda end: end.value)


def decode(kind: type[T], text: str) -> T:
    """Converts the result of encode() back to a message. Raises ValueError for any other text."""
    try:
        found: T = _made(kind, json.loads(text))
        return found
    except (TypeError, RecursionError) as reason:
        raise ValueError(f"not a {kind.__name__}: {reason}") from reason


def _made(kind: Any, value: Any) -> Any:
    """Converts a JSON value to the type that an annotation names."""
    if get_origin(kind) is UnionType:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        return None if value is None else _made(kind, value)
    if isinstance(value, dict):
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    if get_origin(kind) is tuple:
        return tuple(_made(get_args(kind)[0], each) for each in value)
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        return kind(*(_made(hints[x], each) for x, each in zip(kind._fields, value, strict=True)))
    if issubclass(kind, Enum):
        return kind(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value
