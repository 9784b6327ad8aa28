# SPDX-License-Identifier: Apache-2.0
"""What the processes of an elastic job tell each other, and how its ranks meet."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farandole.launch.allgathers import Allgathers
from farandole.membership.messages import (
    AgentStatus,
    Assignment,
    Commit,
    End,
    View,
    Worker,
    WorkerState,
    World,
    decode,
    encode,
)
from farandole.start import agent_client
from farandole.start.agent_client import AgentClient
from farandole.start.server import Client, Server

WORDS = [
    World(3, ("a", "b+"), Commit(2, 7), True),
    View(World(1, ("a",)), 1, 1, 1, True, 2, True),
    WorkerState(1, True, 1, Commit(1, 2), 1, True, True),
    AgentStatus(
        "a",
        3,
        "h",
        2,
        (Worker("x", announced=End.WELL), Worker("y", WorkerState(), End.LOST, "ü", -9)),
    ),
    AgentStatus("a", 4, "h", 2, (), True),
    Assignment(2, 3, ("x",), View()),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_words_as_text(word: Any) -> None:
    kind, text = type(word), encode(word)
    assert decode(kind, text) == word
    fields = json.loads(text)
    for garbage in ("", "{", "null", "7", "[]", "[" * 100_000, json.dumps([*fields, 1])):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(kind, garbage)
    for place in range(len(fields)):
        wrong = [*fields]
        wrong[place] = {"no": "such"}
        with pytest.raises(ValueError):  # noqa: PT011
            decode(kind, json.dumps(wrong))


def test_meetings() -> None:
    allgathers: Allgathers[str] = Allgathers()
    allgathers.begin(World(1, ("x", "y")))
    allgathers.put("a", "x", 1, 1, "of x")
    allgathers.put("b", "z", 1, 1, "of a stranger")
    allgathers.put("b", "y", 2, 1, "too early")
    assert allgathers.answers() == []
    allgathers.put("b", "y", 1, 1, "of y")
    answer = ["met", 1, 1, {"x": "of x", "y": "of y"}]
    assert allgathers.answers() == [("a", answer), ("b", answer)]
    assert allgathers.answers() == [], "once"
    allgathers.put("b", "y", 1, 1, "of y")
    assert allgathers.answers() == [("b", answer)], "what comes twice is answered twice"
    allgathers.begin(World(2, ("y",)))
    allgathers.put("a", "x", 1, 2, "too late")
    allgathers.begin(World(1, ("x", "y")))
    allgathers.put("b", "y", 2, 1, "mine")
    assert allgathers.answers() == [("b", ["met", 2, 1, {"y": "mine"}])]


class Speaker(Server):
    """An agent that says what the test wants."""

    def __init__(self) -> None:
        super().__init__("ranks", b"")
        self._here: Client

    def _received(self, client: Client, message: bytes) -> None:
        if json.loads(message)[0] == "here":
            self._here = client
            self._send(client, json.dumps(["begin", 0, "00"]).encode())

    def say(self, view: View) -> None:
        text = json.dumps(["view", encode(view)]).encode()
        self.call_soon(lambda: self._send(self._here, text))


def test_a_rank_goes_on_once_the_supervisor_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No commit has come meanwhile, so no rank has left."""
    monkeypatch.setattr(agent_client, "_ending", True)  # else the end of the agent ends this rank
    with Speaker() as agent:
        client = AgentClient(agent.address, "0", "x")

        def hears(expected: Callable[[], bool]) -> None:
            with client._changed:
                assert client._changed.wait_for(expected, 60)

        agent.say(View(leave=True, lost=True))
        hears(lambda: client.leaves and client.lost)
        agent.say(View())
        hears(lambda: not (client.leaves or client.lost))
    join_listeners()
    client.connection.close()


def join_listeners() -> None:
    for thread in threading.enumerate():
        if thread.name == "farandole.agent":
            thread.join()


def test_ctrl_c_as_a_rank_begins_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """init() fails, but the rank is not killed when the connection ends."""
    start, killed = threading.Thread.start, list[tuple[int, int]]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "farandole.agent":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "kill", lambda *whom: killed.append(whom))
    with Speaker() as agent, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            AgentClient(agent.address, "0", "x")
    join_listeners()
    assert killed == []
