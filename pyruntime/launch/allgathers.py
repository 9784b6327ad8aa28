# SPDX-License-Identifier: Apache-2.0
"""The allgathers by which the ranks of a world meet, as the supervisor serves them: no socket and
no clock are in here."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from farandole.membership.messages import World

G = TypeVar("G")  # whoever brings the data of ranks, and gets the answers


class Allgathers(Generic[G]):
    """Those of the newest world. What comes twice is answered twice."""

    def __init__(self) -> None:
        self._world = World()
        self._turns: dict[int, dict[str, str]] = {}  # by turn: what each member has brought
        self._askers: dict[int, dict[G, None]] = {}  # by turn: who waits for the answer

    def begin(self, world: World) -> None:
        """From now on this is the newest world."""
        if world.number > self._world.number:
            self._world = world
            self._turns.clear()
            self._askers.clear()

    def put(self, asker: G, name: str, world: int, turn: int, data: str) -> None:
        """A rank's data for one turn; late words of earlier worlds are left out."""
        if world == self._world.number and name in self._world.members:
            self._turns.setdefault(turn, {})[name] = data
            self._askers.setdefault(turn, {})[asker] = None

    def answers(self) -> list[tuple[G, list[Any]]]:
        """The words for those that wait for a turn which is complete."""
        found: list[tuple[G, list[Any]]] = []
        for turn, askers in self._askers.items():
            if len(self._turns[turn]) == len(self._world.members):
                words = ["met", self._world.number, turn, self._turns[turn]]
                found += [(asker, words) for asker in askers]
                askers.clear()
        return found
