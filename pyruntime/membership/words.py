# SPDX-License-Identifier: Apache-2.0
"""What the supervisor, the agents and the ranks of an elastic job tell each other."""

from __future__ import annotations

import json
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
JOINS = "+"  # ends the names of processes that were started when a world trained already


class Commit(NamedTuple):
    """Which commit: the world that it was made or copied in, and its number; later ones are
    greater. A commit of a world that others have gone on without is smaller than any of theirs."""

    world: int
    number: int


NOTHING = Commit(0, 0)  # the state that a program begins with


class World(NamedTuple):
    """A decision: these processes are ranks 0, 1, ... of world `number`."""

    number: int = 0  # 0: there has been none
    members: tuple[str, ...] = ()  # names of processes
    start: Commit = NOTHING  # which rank 0 copies to the others, or all read from the disk
    from_disk: bool = False


class View(NamedTuple):
    """What ranks hear from the supervisor, through their agent."""

    world: World = World()  # the newest
    over: int = 0  # worlds up to this number make no commit any more
    broken: int = 0  # in worlds up to this number a call that waits now will fail
    meet: int = 0  # members of this world shall wait for the next one after their next commit
    leave: bool = False  # all shall end after their next commit, with the state on the disk
    done: int = 0  # calls of elastic training that have ended on all ranks
    lost: bool = False  # the supervisor does not answer; the agent says so, not the supervisor


class Standing(NamedTuple):
    """What a rank says of itself."""

    world: int = 0  # the last one that it was in
    away: bool = False  # it takes part in no call of that world any more, and waits for the next
    over: int = 0  # it will enter no world up to this number
    commit: Commit = NOTHING  # the newest in its memory
    finished: int = 0  # it is away because this call of training, from 1, has come to its end
    met: bool = False  # it is away because all members agreed to meet
    stalled: bool = False  # it is away because another rank hangs


class End(Enum):
    """How a process has ended."""

    WELL = "well"
    LEFT = "left"  # as it was asked to, or because its host is taken away; others may go on
    FAILED = "failed"  # by the program's own doing
    LOST = "lost"  # killed, crashed, or by an error that another attempt may not have


class Rank(NamedTuple):
    """A process, as its agent sees it."""

    name: str
    standing: Standing = Standing()
    end: End | None = None  # None: it lives
    text: str = ""  # about the end
    code: int = 0  # its exit code; less than 0: the signal that has ended it
    said: End | None = None  # how it is about to end, as it says


class Status(NamedTuple):
    """All that an agent knows."""

    agent: str  # its name: another process has another one
    number: int  # rises
    host: str
    slots: int
    ranks: tuple[Rank, ...]
    going: bool = False  # its host is taken away


class Wanted(NamedTuple):
    """All that the supervisor wants of one agent."""

    number: int  # rises
    heard: int  # the number of the newest Status that the supervisor has heard
    ranks: tuple[str, ...]  # which processes shall run: the agent starts and ends others
    view: View


# ---- as text


def encode(word: NamedTuple) -> str:
    """Returns a word as JSON: of any class in this file."""
    return json.dumps(word, default=lambda end: end.value)


def decode(kind: type[T], text: str) -> T:
    """The inverse of encode(). Raises ValueError for a text that encode() has not made."""
    try:
        found: T = _made(kind, json.loads(text))
        return found
    except (TypeError, RecursionError) as reason:
        raise ValueError(f"not a {kind.__name__}: {reason}") from reason


def _made(kind: Any, value: Any) -> Any:
    """`value`, as JSON has it, in the type that an annotation names."""
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
