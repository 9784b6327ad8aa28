# SPDX-License-Identifier: Apache-2.0
"""Rounds: the tensors that an optimizer sends in one backward pass or step, in any framework. For
an adapter's reducer, which lets in one thread at a time.

A round starts with the first tensor that is sent. Once all have been sent, some without data, every
rank takes part in the consensus. The round ends when all its tensors are done.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from farandole._library import error, lib
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.calls import leases
from farandole.calls.arguments import ReduceOp
from farandole.calls.handles import explanation, is_under_way, stall, wait_until
from farandole.calls.requests import Call, Op, PreparedTensor, refuse
from farandole.errors import MismatchError, StallError

_MOST_NAMES = 4  # of members, in an error's text
_INT64 = DTYPES.index("int64")


class Member(Protocol):
    """A tensor that may be in a round: it is, while it has a handle."""

    name: str  # for error texts
    handle: int | None  # the core's, from submission until the result is taken


M = TypeVar("M", bound=Member)


class Limit(NamedTuple):
    """The time limit of one wait."""

    seconds: float
    at: float | None  # time.monotonic() at its end; None: no limit

    @classmethod
    def of(cls, seconds: float | None) -> Limit:
        """From now on; None: no limit."""
        return cls(0.0, None) if seconds is None else cls(seconds, monotonic() + seconds)


class RoundState(NamedTuple):
    """One rank's view of the round that it closes; after the allreduce, the largest values."""

    late: int  # 1: gradients have arrived after theirs had been sent
    sparse: int  # an unexpectedly sparse gradient, (number << 8) + sparse_dim; 0: none
    # Equal on all ranks:
    at_step: int  # 1: step() closes it; 0: a backward pass or synchronize()
    steps: int  # earlier step() calls since the last join()
    tensors: int  # sent in the round
    passes: int  # what gradients were divided by
    # Compared by whoever asks, see Round.equal_models:
    model: int  # a digest of this rank's model, not negative; 0: not compared


_LARGEST = 2  # so many fields, the first, are not compared at all
_REMEDIES = {
    "at_step": "some ranks reduce in backward(), others in step(): do all ranks make equally many "
    "backward passes? One that leaves a pass out calls optimizer.synchronize() in its place",
    "steps": "do all ranks call step() and backward() equally often?",
    "tensors": "do all ranks freeze or add the same parameters?",
    "passes": "with accumulate='mean' all ranks make equally many backward passes in each step",
}


class Round(Generic[M]):
    """One optimizer's rounds, one after another. One thread at a time closes it and waits."""

    def __init__(self, scope: str, process_set: int, members: Sequence[M]) -> None:
        """`scope` is the optimizer's name; valid until shutdown(). `members` may become more."""
        self.scope = scope
        self.open = False
        self.closed = False
        self._members = members
        self._call = Call(Op.ALLREDUCE, f"{scope}.consensus", process_set, ReduceOp.MAX)
        self._tensor: PreparedTensor | None = None  # of the consensus
        self._words = array("q")  # its memory; fields that must be equal are also sent negated
        self.equal_models = True  # in the round that was heard last
        self._consensus: int | None = None  # its handle, until it has been waited for
        self.handles: Any = []  # of its tensors, as int64_t[], once it is closed; see renew()
        self.epoch = leases.epoch()  # of the handles
        self._unfinished: list[int] = []  # handles of a failed round, to be completed

    def begin(self) -> None:
        """To be called before the first tensor is sent."""
        if self._tensor is None:
            count = 2 * len(RoundState._fields) - _LARGEST
            self._tensor = PreparedTensor(self._call, Buffer(0, _INT64, (count,), None))
        while self._unfinished:  # else their names would still be in use
            wait_until([self._unfinished[-1]], None)
            self._unfinished.pop()
        self.open = True

    def close(self, state: RoundState) -> None:
        """Submits the consensus of all ranks, after all tensors. Does not wait."""
        assert self._tensor is not None
        if self._consensus is None:  # else a signal came as this was called before
            self._words = words = array("q", [*state, *(-x for x in state[_LARGEST:])])
            address, made = words.buffer_info()[0], list[int]()
            try:
                self._tensor.submit(address, address, words, made)
            finally:
                self._consensus = made[0] if made and made[0] > 0 else None
        self.renew()
        self.closed = True

    @property
    def sent(self) -> list[M]:
        """The members that are in it."""
        return [m for m in self._members if m.handle is not None]

    def renew(self) -> None:
        """Notes the handles that its members have now."""
        handles = [m.handle for m in self._members if m.handle is not None]
        self.handles = leases.numbers_of(handles)

    def hear(self, limit: Limit) -> Exception | RoundState:
        """Waits for the consensus; returns its result, or the error. May be called again.

        Raises StallError at the limit. Then, and after a signal handler's exception, the round
        stays as it is.
        """
        if self._consensus is not None:
            if failure := self._wait([self._consensus], limit):
                return failure
            handle, self._consensus = self._consensus, None
            leases.end([handle])
        count = len(RoundState._fields)
        state = RoundState(*self._words[:count])
        names = RoundState._fields[_LARGEST:]
        for field, high, low in zip(names, state[_LARGEST:], self._words[count:], strict=True):
            if field == "model":
                self.equal_models = high == -low
            elif high != -low:
                return MismatchError(
                    f"{self.scope}: ranks are not in the same optimizer step: {field} is {-low} on "
                    f"one rank, {high} on another; {_REMEDIES[field]}"
                )
        return state

    def wait(self, limit: Limit) -> Exception | None:
        """Waits for all tensors; as hear()."""
        return self._wait(self.handles, limit)

    def _wait(self, handles: Any, limit: Limit) -> Exception | None:
        code = wait_until(handles, limit.at)
        if code == lib.FARANDOLE_PENDING:
            raise self._late(limit.seconds)
        return None if code == lib.FARANDOLE_OK else error(code)

    def _late(self, seconds: float) -> StallError:
        missing = [m for m in self.sent if is_under_way(m.handle or 0)]
        names = ", ".join(m.name for m in missing[:_MOST_NAMES])
        if len(missing) > _MOST_NAMES:
            names += f" and {len(missing) - _MOST_NAMES} more"
        what = f"gradients of {names}" if missing else "all ranks' step()"
        why = explanation([m.handle or 0 for m in missing] or [self._consensus or 0])
        return stall(f"{self.scope}: {what}", seconds, why)

    def refuse(self, reason: Exception) -> None:
        """Fails the consensus on all ranks, with the reason why this rank can't continue."""
        refuse(self._call, reason)

    def abandon(self) -> None:
        """Gives up its results: leaves all handles under way to leases, and to the next round,
        which waits for them, as all ranks complete or refuse them. It is over once the caller says
        so by `open` and `closed`, after its members have forgotten their handles."""
        numbers = [*(m.handle for m in self.sent), self._consensus]
        handles = [number for number in numbers if number is not None]
        self._consensus = None
        leases.drop(handles, self.epoch)
        self._unfinished += handles
