# SPDX-License-Identifier: Apache-2.0
"""Kinds of failures, and whether ranks got what they must."""

from __future__ import annotations

from typing import Any

from strangers import loop_reference, reference
from strangers.loops import Loop
from strangers.plan import plan
from strangers.program import Program

__all__ = ["Crashed", "Failure", "Hung", "Overwritten", "Raised", "Unequal", "Unnoticed", "judge"]


class Failure(AssertionError):
    """Something is wrong with farandole, or with the model. Each kind shrinks by itself."""


class Crashed(Failure):
    """A rank was ended by a signal, or ended itself."""


class Hung(Failure):
    """A program did not come to its end."""


class Raised(Failure):
    """A rank raised what it should not."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Unequal(Failure):
    """A rank has other values than the model."""


class Overwritten(Failure):
    """Memory of the program's own has been written to."""


class Unnoticed(Failure):
    """A wrong call had another end than an error on all ranks, or a promise was not kept."""


def judge(program: Program | Loop, answers: list[Any]) -> None:
    """Raises a Failure with all that is wrong, of the worst kind."""
    found: list[tuple[int, str]] = []
    for rank, answer in enumerate(answers):
        found += [(rank, text) for word, text in _told(answer) if word == "wrong"]
    overwritten = [(r, text) for r, text in found if "overwritten" in text or "changed" in text]
    others = [one for one in found if one not in overwritten]
    _complain(Overwritten, overwritten)
    unequal = _loop(program, answers) if isinstance(program, Loop) else _calls(program, answers)
    _complain(Unequal, unequal)
    _complain(Unnoticed, others)


def _told(answer: Any) -> list[tuple[str, str]]:
    return [(what[0], what[1]) for what in answer if what[0] == "wrong"]


def _complain(kind: type[Failure], found: list[tuple[int, str]]) -> None:
    if found:
        raise kind("\n".join(f"rank {rank}: {text}" for rank, text in found))


def _calls(program: Program, answers: list[Any]) -> list[tuple[int, str]]:
    made = plan(program, len(answers))
    found = []
    for rank, answer in enumerate(answers):
        for word, *rest in answer:
            if word == "value":
                call = made.calls[rest[0]]
                if text := reference.difference(call, rank, rest[1]):
                    what = f"call {call.number} ({call.tensor.op}, {call.name!r})"
                    found.append((rank, f"{what}: {text}"))
    return found


def _loop(loop: Loop, answers: list[Any]) -> list[tuple[int, str]]:
    right = loop_reference.states(loop, len(answers))
    found = []
    for rank, answer in enumerate(answers):
        got = [rest[0] for word, *rest in answer if word == "state"]
        if text := loop_reference.difference(loop, got, right):
            found.append((rank, text))
    return found
