# SPDX-License-Identifier: Apache-2.0
"""A round, and the consensus that ends a round.

A round is one reduction of an optimizer's gradients, by a backward pass or by step(). The classes
are used on the threads that send gradients and on those that wait for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from farandole._library import error, lib
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.calls import leases
from farandole.calls.handles import wait_until
from farandole.calls.requests import Call, Op, PreparedCall, give_scope_back, next_scope
from farandole.errors import MismatchError
from farandole.ops import Max

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.passes import BackwardPass

_KIND = "optimizer"  # of objects whose names next_scope() numbers
_INT64 = DTYPES.index("int64")


def no_pass() -> None:
    """The value of Round.inside if the round belongs to no pass, or to a pass that has ended."""


class Round:
    """The state of one round. Each round has a new object, so nothing of earlier rounds remains."""

    __slots__ = (
        *("again", "batch", "closing", "handles", "inside", "late", "memory", "open", "plain"),
        *("sending", "sent", "sparse"),
    )

    def __init__(self, again: bool = False) -> None:
        """`again` is True if an earlier round of the same pass has ended."""
        self.again = again
        # Weak reference to the pass, set from the pass's first gradient to the end of the pass. The
        # reference returns None if an exception has ended the pass.
        self.inside: Callable[[], BackwardPass | None] = no_pass
        self.open = False  # True if gradients may have been sent
        self.closing = False  # True if the end of the pass will close the round
        self.sending = False  # True if gradients are sent as they are accumulated
        self.late = False  # True if a gradient was accumulated again after it had been sent
        self.sparse = 0  # see RoundState
        self.batch: list[Gradient] = []  # gradients that hooks have taken but not sent yet
        self.plain: list[Gradient] = []  # gradients sent in a batch; each becomes `.grad` unchanged
        self.sent: dict[Gradient, int] = {}  # each gradient that was sent, and the core's handle
        # int64_t array of these handles and the consensus's handle. Set when the round is closed.
        self.handles: Any = None
        self.memory: set[int] = set()  # addresses of gradients that are reduced in place


class RoundState(NamedTuple):
    """One rank's view of the round that it closes. The allreduce returns the largest values."""

    late: int  # 1 if a gradient was accumulated again after it had been sent
    # (number << 8) + sparse_dim of a gradient that is unexpectedly sparse, or 0 if there is none.
    sparse: int
    # Fields that must be equal on all ranks:
    at_step: int  # 1 if step() closes the round, 0 if a backward pass or synchronize() does
    steps: int  # number of step() calls since the last join()
    parameters: int  # checksum of the parameters whose gradients this rank has sent
    named: int  # number of optimizers, including this one, that get a name in this round
    # This field is compared, but need not be equal on all ranks; see Consensus.equal_models.
    model: int  # digest of this rank's model, never negative; 0 if models are not compared now


_FREE = 2  # number of fields, at the front, that may differ between ranks
_COUNT = len(RoundState._fields)
_REMEDIES = {
    "at_step": "some ranks reduce in backward(), others in step(): make equally many backward "
    "passes on all ranks; a rank that skips one must call optimizer.synchronize() instead",
    "steps": "call step() and backward() equally often on all ranks",
    "named": "in the first backward pass after a restart, ranks used different optimizers; remedy: "
    "make them attributes of the elastic state, or use the same ones in every rank's first pass",
}


class Consensus:
    """The allreduce by which ranks check that they have all closed a round in the same way.

    An optimizer has one Consensus in each world. The allreduce's name starts with the same scope as
    the names of the optimizer's other calls.
    """

    def __init__(self, process_set: int, world: int) -> None:
        """`world` is the number of the present world, or 0 if the calls get their names later."""
        self.scope = next_scope(_KIND, process_set) if world else _KIND
        self.world = world
        self.call = Call(Op.ALLREDUCE, f"{self.scope}.consensus", process_set, Max)
        shape = (2 * _COUNT - _FREE,)
        self._prepared = PreparedCall(self.call, Buffer(0, _INT64, shape, None))
        # The call's memory holds all fields of a RoundState, then the compared fields negated. The
        # maximum over the ranks therefore yields the largest value of each field, then the negated
        # smallest value of each compared field.
        self._words = array("q")
        self._own_part = ""
        self.equal_models = True  # True if the models were equal in the last round
        self.left: list[int] = []  # handles of a failed round, whose names may still be in use

    def give_name_back(self) -> None:
        """Lets the next optimizer have this name. Call this if the optimizer cannot be made."""
        if self.world:
            give_scope_back(_KIND, self.call.process_set)

    def begin(self) -> None:
        """Waits until the calls of a failed round have released their names.

        Call this before a round's first gradient is sent.
        """
        left, self.left = self.left, []
        for handle in left:
            outcome((handle,))

    def submit(self, state: RoundState, own_part: str) -> int:
        """Submits this rank's state. Call this after all gradients. Returns the core's handle.

        `own_part` describes the gradients that this rank has sent, for the error text in case that
        ranks differ.
        """
        self._own_part = own_part
        self._words = words = array("q", [*state, *(-x for x in state[_FREE:])])
        address = words.buffer_info()[0]
        return leases.lend(self._prepared.start, address, address, words)

    def wait(self, handle: int) -> RoundState | Exception:
        """Waits for the call. Returns the largest values or the error, equal on all ranks."""
        if failure := outcome((handle,)):
            return failure
        state = RoundState(*self._words[:_COUNT])
        names = RoundState._fields[_FREE:]
        for field, high, low in zip(names, state[_FREE:], self._words[_COUNT:], strict=True):
            if field == "model":
                self.equal_models = high == -low
            elif high != -low:
                return MismatchError(f"{self.scope}: {self._difference(field, -low, high)}")
        return state

    def _difference(self, field: str, low: int, high: int) -> str:
        if field == "parameters":
            return (
                "ranks have sent gradients of different parameters; this rank has sent those of "
                f"{self._own_part}: freeze and add the same parameters on all ranks"
            )
        return (
            f"ranks are not in the same optimizer step: {field} is {low} on one rank, {high} on "
            f"another; {_REMEDIES[field]}"
        )


def outcome(handles: Any) -> Exception | None:
    """Waits for these calls. Returns the error of a call that has failed, or None."""
    code = wait_until(handles, None)
    return None if code == lib.FARANDOLE_OK else error(code)
