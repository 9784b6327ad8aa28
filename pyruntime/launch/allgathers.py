# SPDX-License-Identifier: Apache-2.0
"""The supervisor's side of the allgathers by which the ranks of a new world meet. Uses no sockets
or clocks."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from farandole.membership.messages import World

G = TypeVar("G")  # a connection that brings ranks' data and gets the answers


class Allgathers(Generic[G]):
    """Allgathers of the newest world, numbered by turn. Repeated data is answered again."""

    def __init__(self) -> None:
        self._world = World()
        self._turns: dict[int, dict[str, str]] = {}  # by turn: data by member
        self._askers: dict[int, dict[G, None]] = {}  # by turn: connections that wait for the answer

    def begin(self, world: World) -> None:
        """Starts over if this world is newer."""
        if world.number > self._world.number:
            self._world = world
            self._turns.clear()
            self._askers.clear()

    def put(self, asker: G, name: str, world: int, turn: int, data: str) -> None:
        """Takes a rank's data for one turn; data for other worlds is ignored."""
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
