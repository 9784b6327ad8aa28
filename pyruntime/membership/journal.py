# SPDX-License-Identifier: Apache-2.0
"""What a supervisor of an elastic job leaves to the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from farandole.membership.words import NOTHING, Commit, World


class Record(NamedTuple):
    """The durable state."""

    term: int = 0  # of the supervisor that has written it
    world: World = World()  # the newest that was decided
    done: int = 0  # calls of elastic training that have ended on all its ranks
    ended: bool = False  # a process has ended well: no other one is started for it


class Unready(Exception):
    """The disk has not answered: ask again. The text says what it does instead."""


class Journal(ABC):
    """Stores the record. Each operation happens as a whole, or not at all. write() and commit() may
    raise Unready."""

    @abstractmethod
    def take(self) -> Record:
        """Begins the next term; from now on write() fails for all earlier ones."""

    @abstractmethod
    def write(self, record: Record) -> bool:
        """Writes unless a later term has started; returns whether it has written."""

    @abstractmethod
    def term(self) -> int:
        """The newest term that was seen."""

    def commit(self) -> Commit:
        """The newest commit on the disk."""
        return NOTHING

    def close(self) -> None:  # noqa: B027
        """Notes that no process of the job lives: the next term need not wait for any."""
