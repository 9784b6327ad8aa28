# SPDX-License-Identifier: Apache-2.0
"""The supervisor's part in the allgathers by which the ranks of a new world meet.

The module does not use sockets or the clock.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from farandole.membership.messages import World

G = TypeVar("G")  # a connection that delivers ranks' data and receives the answers


class Allgathers(Generic[G]):
    """The allgathers of the newest world, numbered by turn. Data sent again is answered again."""

    def __init__(self) -> None:
        self._world = World()
        self._turns: dict[int, dict[str, str]] = {}  # each member's data, by turn and member
        self._askers: dict[int, dict[G, None]] = {}  # connections that wait for an answer, by turn

    def begin(self, world: World) -> None:
        """Drops all data if `world` is newer than the present world."""
        if world.number > self._world.number:
            self._world = world
            self._turns.clear()
            self._askers.clear()

    def put(self, asker: G, name: str, world: int, turn: int, data: str) -> None:
        """Stores a rank's data for one turn. Ignores data for other worlds."""
        if world == self._world.number and name in self._world.members:
            self._turns.setdefault(turn, {})[name] = data
            self._askers.setdefault(turn, {})[asker] = None

    def answers(self) -> list[tuple[G, list[Any]]]:
        """Returns pairs of a connection and a message for each complete turn, each pair once."""
        found: list[tuple[G, list[Any]]] = []
        for turn, askers in self._askers.items():
            if len(self._turns[turn]) == len(self._world.members):
                fields = ["met", self._world.number, turn, self._turns[turn]]
                found += [(asker, fields) for asker in askers]
                askers.clear()
        return found
