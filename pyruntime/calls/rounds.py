# SPDX-License-Identifier: Apache-2.0
"""Rounds: the tensors that an optimizer has sent between two of its steps, in any framework. For an
adapter's reducer, which lets in one thread at a time.

A round begins with the first tensor that is sent. Once all have been sent, some without data,
every rank takes part in the step consensus; the round ends when all its tensors are done.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from farandole._library import error, lib
from farandole.arrays.buffers import DTYPES, EMPTY, Buffer
from farandole.calls import leases
from farandole.calls.arguments import ReduceOp
from farandole.calls.handles import explanation, is_under_way, stall, wait_until
from farandole.calls.requests import Call, Op, PreparedTensor, refuse
from farandole.errors import MismatchError, StallError

_MOST_NAMES = 4  # of members, in an error's text
_INT64 = DTYPES.index("int64")


class Member(Protocol):
    """A tensor in a round."""

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
        return NEVER if seconds is None else cls(seconds, monotonic() + seconds)


NEVER = Limit(0.0, None)


class RoundState(NamedTuple):
    """One rank's view of the round that it closes; after the allreduce, the largest values."""

    late: int  # gradients that arrived after their reduction had begun
    dropped: int  # 1: this rank drops the gradients, it does not use them
    sparse: int  # an unexpectedly sparse gradient, as in Reducer._send_rest; 0: none
    early: int  # 1: with complete_after_backward this rank closes it before step()
    stepping: int  # 1 + this rank, which closes it in step() only; 0: it does not, or need not say
    # Equal on all ranks:
    steps: int  # earlier step() calls since the last join()
    tensors: int  # sent in the round
    carried: int  # gradients sent in a dropped round that belong to the next one
    divisors: int  # what gradients were divided by, where the round adds to an earlier one
    reset: int  # which gradients the user has reset since they were sent; 0: none


_LARGEST = 5  # so many fields may differ between ranks; the others must be equal
_REMEDIES = {
    "steps": "do all ranks call step() and zero_grad() equally often, and backward() too where "
    "complete_after_backward is set?",
    "tensors": "do all ranks freeze or add the same parameters?",
    "carried": "do all ranks reset the same gradients?",
    "reset": "reset gradients on all ranks alike, between backward() and step(), too",
    "divisors": "with accumulate='mean' all ranks make equally many backward passes, and use the "
    "same parameters in them, in a step that has more than backward_passes_per_step",
}


class _StepConsensus:
    """The allreduce (Max) of 120 bytes by which all ranks close a round; fields of the RoundState
    that must be equal are also sent negated."""

    def __init__(self, scope: str, process_set: int) -> None:
        """`scope` is the optimizer's name, `process_set` its set's number."""
        self._scope = scope
        self._words = array("q")
        count = 2 * len(RoundState._fields) - _LARGEST
        self._call = call = Call(Op.ALLREDUCE, f"{scope}.consensus", process_set, ReduceOp.MAX)
        self._tensor = PreparedTensor(call, Buffer(0, _INT64, (count,), None))
        self.handle: int | None = None  # of the core, until it has been waited for
        self._ended = 0  # the handle of an earlier one, which may not be released

    def send(self, state: RoundState) -> None:
        """Submits this rank's state; does not wait."""
        self._words = words = array("q", [*state, *(-x for x in state[_LARGEST:])])
        address = words.buffer_info()[0]
        try:
            self.handle = self._tensor.submit(address, address, words)
        except BaseException:  # of a signal handler, perhaps once it was submitted
            lost = self._tensor.lost()
            self.handle = None if lost in (0, self._ended) else lost
            raise

    def refuse(self, reason: Exception) -> None:
        """Tells the peers that this rank can't take part, and why."""
        refuse(self._call, reason)

    def result(self, keep: bool) -> RoundState:
        """The state over all ranks, once the handle is done. May be called again.

        `keep`: this rank uses the round's gradients, so no other may have dropped them. Raises
        MismatchError where ranks were not in the same round.
        """
        handle, self.handle = self.handle, None
        if handle is not None:
            self._ended = handle
            leases.end([handle])
        count = len(RoundState._fields)
        state = RoundState(*self._words[:count])
        fields = zip(
            RoundState._fields[_LARGEST:], state[_LARGEST:], self._words[count:], strict=True
        )
        for field, high, low in fields:
            if high != -low:
                raise MismatchError(
                    f"{self._scope}: ranks are not in the same optimizer step: {field} is "
                    f"{-low} on one rank, {high} on another; {_REMEDIES[field]}"
                )
        if state.dropped and keep:
            raise MismatchError(
                f"{self._scope}: this rank uses gradients that another rank has dropped by "
                "zero_grad(): all ranks must do the same"
            )
        return state


class Round(Generic[M]):
    """One optimizer's rounds, one after another. One thread at a time closes it and waits."""

    def __init__(self, scope: str, process_set: int) -> None:
        """`scope` is the optimizer's name; valid until shutdown()."""
        self.scope = scope
        self.open = False
        self.closed = False
        self.dropping = False  # closed, and its results will be dropped
        self.sent: list[M] = []
        self._promised = False  # a wait has begun and not ended
        self._taken: dict[int, M] = {}  # the member whose memory begins at an address
        self._process_set = process_set
        self._consensus: _StepConsensus | None = None
        self._handles: Any = []  # of its tensors, as int64_t[], once it is closed
        self._epoch = 0  # of the handles
        self._unfinished: list[int] = []  # handles of a failed round, to be completed

    def begin(self) -> None:
        """To be called before the first tensor is sent."""
        if self._consensus is None:
            self._consensus = _StepConsensus(self.scope, self._process_set)
        for handle in self._unfinished:  # else their names would still be in use
            wait_until([handle], None)
        self._unfinished = []
        self._epoch = leases.epoch()
        self.open = True

    def take(self, address: int, member: M) -> M:
        """Notes the memory that a member sends. Returns the member that sent it first."""
        if address in (0, EMPTY):
            return member
        return self._taken.setdefault(address, member)

    def close(self, state: RoundState) -> None:
        """Submits the step consensus, if that is not done, after all tensors. Does not wait."""
        assert self._consensus is not None
        if self._consensus.handle is None:
            self._consensus.send(state)
        self.renew()
        self.dropping, self.closed = bool(state.dropped), True

    def renew(self) -> None:
        """Notes the handles that its members have now."""
        self._handles = leases.numbers_of([m.handle for m in self.sent if m.handle is not None])

    def hear(self, limit: Limit) -> Exception | RoundState:
        """Waits for the step consensus; returns its result, or the error.

        Raises StallError at the limit. Then, and after a signal handler's exception, the round
        stays as it is and the consensus stays submitted: this must be called again.
        """
        self._promised = True  # until end(): a signal handler may raise anywhere
        consensus = self._consensus
        assert consensus is not None
        failure = self._wait([] if consensus.handle is None else [consensus.handle], limit)
        try:
            return failure or consensus.result(keep=not self.dropping)
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
        handles = [m.handle for m in missing] or (
            [self._consensus.handle] if self._consensus else []
        )
        why = explanation([handle for handle in handles if handle is not None])
        return stall(f"{self.scope}: {what}", seconds, why)

    def check_not_promised(self) -> None:
        """Raises RuntimeError if a wait was interrupted or timed out, and was not repeated."""
        if self._promised and not self.dropping:
            raise RuntimeError(
                "the last step() or synchronize() did not come to its end (its timeout has passed, "
                "or a signal came): call it again before the next backward() or zero_grad()"
            )

    def refuse(self, reason: Exception) -> None:
        """Fails the step consensus on all ranks, with the reason why this rank can't continue."""
        assert self._consensus is not None
        self._consensus.refuse(reason)

    def fail(self) -> None:
        """Notes a failure. The next round waits for these handles, which all ranks complete."""
        self._unfinished = [m.handle for m in self.sent if m.handle is not None]

    def end(self) -> Sequence[int]:
        """Ends it. Returns the handles of its tensors, if it was closed.

        Calls nothing, so that no signal handler can raise halfway or before the caller goes on.
        """
        handles, self._handles = self._handles, []
        self.open = self.closed = self.dropping = self._promised = False
        self.sent, self._taken = [], {}
        return handles  # type: ignore[no-any-return]  # an array of the core

    def drop(self) -> None:
        """Leaves all handles under way to leases: nobody will wait for them."""
        handles = [m.handle for m in self.sent if m.handle is not None]
        if self._consensus is not None and self._consensus.handle is not None:
            handles.append(self._consensus.handle)
            self._consensus.handle = None
        leases.drop(handles, self._epoch)
