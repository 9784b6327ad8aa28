# SPDX-License-Identifier: Apache-2.0
"""Rounds: the tensors that an optimizer has in flight between two of its steps, in any framework.

A round begins with the first tensor that is sent. Once all have been sent, if only as "nothing
here", every rank says the closing word, and the round ends when all of them are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from farandole._library import error, lib
from farandole.arrays.buffers import EMPTY
from farandole.calls import leases
from farandole.calls.closing import ClosingWord, Statement
from farandole.calls.handles import explanation, is_under_way, stall, wait_until
from farandole.errors import StallError

__all__ = ["NEVER", "Limit", "Member", "Round"]

_MOST_NAMES = 4  # of members, in an error's text


class Member(Protocol):
    """A tensor in a round."""

    name: str  # for error texts
    handle: int | None  # of the core, from its submission until its result has been taken


M = TypeVar("M", bound=Member)


class Limit(NamedTuple):
    """Of one wait."""

    seconds: float
    at: float | None  # of time.monotonic(); None: there is none

    @classmethod
    def of(cls, seconds: float | None) -> Limit:
        """None: there is none."""
        return NEVER if seconds is None else cls(seconds, monotonic() + seconds)


NEVER = Limit(0.0, None)


class Round(Generic[M]):
    """One optimizer's, again and again. One thread at a time closes it and waits."""

    def __init__(self, scope: str, process_set: int) -> None:
        """`scope` is the optimizer's name; valid until shutdown()."""
        self.scope = scope
        self.open = False
        self.closed = False
        self.dropping = False  # closed without use for its results
        self.sent: list[M] = []
        self._promised = False  # a wait has not come to its end
        self._taken: dict[int, M] = {}  # whose memory begins where
        self._process_set = process_set
        self._word: ClosingWord | None = None
        self._handles: Any = []  # as the core takes them, once it is closed
        self._epoch = 0  # of the handles
        self._unfinished: list[int] = []  # of a round that failed, but all ranks send to the end

    def begin(self) -> None:
        """The first tensor is about to be sent."""
        if self._word is None:
            self._word = ClosingWord(self.scope, self._process_set)
        for handle in self._unfinished:  # or their names would still be in use
            wait_until([handle], None)
        self._unfinished = []
        self._epoch = leases.epoch()
        self.open = True

    def take(self, address: int, member: M) -> M:
        """The round reduces what begins there. Gives who has that memory: `member` or another."""
        if address in (0, EMPTY):
            return member
        return self._taken.setdefault(address, member)

    def close(self, statement: Statement) -> None:
        """All has been sent: says the word, unless that has been done, and does not wait."""
        assert self._word is not None
        if self._word.handle is None:
            self._word.send(statement)
        self._handles = leases.numbers_of([m.handle for m in self.sent if m.handle is not None])
        self.dropping, self.closed = bool(statement.dropped), True

    def hear(self, limit: Limit) -> Exception | Statement:
        """Waits for the closing word: what all ranks said, or what has failed.

        Raises StallError at the limit. Then, and after an exception of a signal handler, the
        round stays as it is, and this rank's word is given: somebody has to come here again.
        """
        self._promised = True  # until the end: the handler of a signal may raise anywhere
        word = self._word
        assert word is not None
        failure = self._wait([] if word.handle is None else [word.handle], limit)
        try:
            return failure or word.said(keep=not self.dropping)
        except Exception as reason:
            return reason

    def wait(self, limit: Limit) -> Exception | None:
        """Waits for all tensors; as hear()."""
        return self._wait(self._handles, limit)

    def _wait(self, handles: Any, limit: Limit) -> Exception | None:
        code = wait_until(handles, limit.at)
        if code == lib.FARANDOLE_PENDING:
            raise self._late(limit.seconds)
        return None if code == lib.FARANDOLE_OK else error(code)

    def _late(self, seconds: float) -> StallError:
        missing = [m for m in self.sent if m.handle is not None and is_under_way(m.handle)]
        names = ", ".join(m.name for m in missing[:_MOST_NAMES])
        if len(missing) > _MOST_NAMES:
            names += f" and {len(missing) - _MOST_NAMES} more"
        what = f"gradients of {names}" if missing else "all ranks' step()"
        handles = [m.handle for m in missing] or ([self._word.handle] if self._word else [])
        why = explanation([handle for handle in handles if handle is not None])
        return stall(f"{self.scope}: {what}", seconds, why)

    def check_not_promised(self) -> None:
        """Raises RuntimeError if a wait has passed its time and was not taken up again."""
        if self._promised and not self.dropping:
            raise RuntimeError(
                "the last step() or synchronize() did not come to its end (its timeout has passed, "
                "or a signal came): call it again before the next backward() or zero_grad()"
            )

    def refuse(self, reason: Exception) -> None:
        """This rank can't go on: its peers hear why instead of the closing word."""
        assert self._word is not None
        self._word.refuse(reason)

    def fail(self) -> None:
        """Some rank has failed in it, and all others complete it: so do the handles."""
        self._unfinished = [m.handle for m in self.sent if m.handle is not None]

    def end(self) -> Sequence[int]:
        """It is over. Gives the handles of its tensors, once it has been closed."""
        handles, self._handles = self._handles, []
        self.open = self.closed = self.dropping = self._promised = False
        self.sent = []
        self._taken.clear()
        return handles  # type: ignore[no-any-return]  # an array of the core

    def drop(self) -> None:
        """Nobody waits for what is in flight any more."""
        handles = [m.handle for m in self.sent if m.handle is not None]
        if self._word is not None and self._word.handle is not None:
            handles.append(self._word.handle)
            self._word.handle = None
        leases.drop(handles, self._epoch)
