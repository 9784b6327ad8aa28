# SPDX-License-Identifier: Apache-2.0
"""Messages between the supervisor, the agents and the ranks of an elastic job, as JSON."""

from __future__ import annotations

import json
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
JOINS = "+"  # last character of the names of processes that were started to join a running world


class Commit(NamedTuple):
    """Identifies a commit by the world that made or copied it, and its number. A later one is
    greater; commits of a newer world are greater than all of an older one."""

    world: int
    number: int


NOTHING = Commit(0, 0)  # the state with which a program starts


class World(NamedTuple):
    """A world: `members[r]` is the name of the process with rank r."""

    number: int = 0  # 0: no world yet
    members: tuple[str, ...] = ()
    start: Commit = NOTHING  # rank 0 has it, and sends it to the others
    from_disk: bool = False  # rank 0 reads it from the disk first


class View(NamedTuple):
    """State of the job, from the supervisor to the ranks through their agent."""

    world: World = World()  # the newest
    over: int = 0  # worlds up to this number make no more commits
    broken: int = 0  # in worlds up to this number, waiting calls will fail
    meet: int = 0  # members of this world must meet in the next one after their next commit
    leave: bool = False  # all ranks must end after their next commit, with the state on the disk
    done: int = 0  # calls of train() that have ended on all ranks
    lost: bool = False  # the supervisor does not answer; set by the agent


class WorkerState(NamedTuple):
    """State of a rank, from the rank to the supervisor through its agent."""

    world: int = 0  # the last world that it was in
    away: bool = False  # waits for the next world, and makes no more calls in the last one
    over: int = 0  # will not enter worlds up to this number
    commit: Commit = NOTHING  # newest one in its memory
    finished: int = 0  # away because this call of train(), from 1, has ended here
    met: bool = False  # away because all members agreed to meet
    stalled: bool = False  # away because another rank hangs


class End(Enum):
    """Why a process ended."""

    WELL = "well"  # success
    LEFT = "left"  # it was asked to, or its host is being preempted; others may continue
    FAILED = "failed"  # by an error of the program: no retry
    LOST = "lost"  # killed, crashed, or by an error that a retry may avoid


class Worker(NamedTuple):
    """A process of the job, as its agent sees it."""

    name: str
    state: WorkerState = WorkerState()
    end: End | None = None  # None while it lives
    text: str = ""  # describes the end
    code: int = 0  # exit code; -N for signal N
    announced: End | None = None  # how it says that it is about to end


class AgentStatus(NamedTuple):
    """State of a host, from its agent to the supervisor."""

    agent: str  # name of the agent's process
    number: int  # rises with each message
    host: str
    slots: int
    workers: tuple[Worker, ...]
    draining: bool = False  # the host is being preempted


class Assignment(NamedTuple):
    """The processes that a host must run, from the supervisor to its agent."""

    number: int  # rises with each message
    heard: int  # number of the newest AgentStatus that the supervisor has received
    workers: tuple[str, ...]  # names; the agent starts missing ones and kills all others
    view: View


# ---- JSON


def encode(message: NamedTuple) -> str:
    """Returns any message of this file as JSON."""
    return json.dumps(message, default=lambda end: end.value)


def decode(kind: type[T], text: str) -> T:
    """Inverse of encode(). Raises ValueError for any other text."""
    try:
        found: T = _made(kind, json.loads(text))
        return found
    except (TypeError, RecursionError) as reason:
        raise ValueError(f"not a {kind.__name__}: {reason}") from reason


def _made(kind: Any, value: Any) -> Any:
    """Converts a JSON value to the type of an annotation."""
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
