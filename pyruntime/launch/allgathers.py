# SPDX-License-Identifier: Apache-2.0
"""The supervisor's part in the allgathers by which the ranks of a new world meet. Uses no sockets
and no clock."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from farandole.membership.messages import World

G = TypeVar("G")  # a connection that delivers data of ranks and receives the answers


class Allgathers(Generic[G]):
    """The allgathers of the newest world, numbered by turn. Answers repeated data again."""

    def __init__(self) -> None:
        self._world = World()
        self._turns: dict[int, dict[str, str]] = {}  # turn -> (member -> data)
        self._askers: dict[int, dict[G, None]] = {}  # turn -> connections that wait for the answer

    def begin(self, world: World) -> None:
        """Drops all data if this world is newer."""
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
        """Returns (connection, message) for each complete turn, once."""
        found: list[tuple[G, list[Any]]] = []
        for turn, askers in self._askers.items():
            if len(self._turns[turn]) == len(self._world.members):
                fields = ["met", self._world.number, turn, self._turns[turn]]
                found += [(asker, fields) for asker in askers]
                askers.clear()
        return found
