# SPDX-License-Identifier: Apache-2.0
"""A round: what one backward pass, or step() in its place, has under way; and the consensus of all
ranks that ends it. For the Reducer and its Gradients, on the threads that send and wait."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from farandole._library import error, lib
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.calls import leases
from farandole.calls.handles import wait_until
from farandole.calls.requests import Call, Op, PreparedCall, next_scope
from farandole.errors import MismatchError
from farandole.ops import Max

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Pass

_INT64 = DTYPES.index("int64")


def no_pass() -> None:
    """Round.inside of a round that belongs to no pass, or to one that has ended."""


class Round:
    """The state of one reduction by a backward pass, or by step() in its place. Made at its start
    and dropped at its end, so that none finds what another has left."""

    __slots__ = (
        *("again", "batch", "closing", "handles", "inside", "late", "memory", "open", "plain"),
        *("sending", "sent", "sparse"),
    )

    def __init__(self, again: bool = False) -> None:
        """`again`: one of several rounds of the same pass."""
        self.again = again
        # A weak reference, from the first gradient of a pass to its end.
        self.inside: Callable[[], Pass | None] = no_pass
        self.open = False  # gradients may be under way
        self.closing = False  # the end of the pass closes it
        self.sending = False  # gradients that arrive are taken and sent
        self.late = False  # gradients have arrived after theirs had been sent
        self.sparse = 0  # as in RoundState
        self.batch: list[Gradient] = []  # of what was taken, to be sent together
        self.plain: list[Gradient] = []  # of what was sent so: each becomes `.grad` as it is
        self.sent: dict[Gradient, int] = {}  # all of the round, with the core's handles
        self.handles: Any = None  # the same and the consensus', once it was closed, as int64_t[]
        self.memory: set[int] = set()  # addresses of what is reduced in its own memory


class RoundState(NamedTuple):
    """One rank's view of the round that it closes; after the allreduce, the largest values."""

    late: int  # 1: gradients have arrived after theirs had been sent
    sparse: int  # an unexpectedly sparse gradient, (number << 8) + sparse_dim; 0: none
    # Equal on all ranks:
    at_step: int  # 1: step() closes it; 0: a backward pass or synchronize()
    steps: int  # earlier step() calls since the last join()
    tensors: int  # sent in the round
    named: int  # optimizers that got a name together, where this one did since its last round
    # Compared by whoever asks, see Consensus.equal_models:
    model: int  # a digest of this rank's model, not negative; 0: not compared


_LARGEST = 2  # so many fields, the first, are not compared at all
_COUNT = len(RoundState._fields)
_REMEDIES = {
    "at_step": "some ranks reduce in backward(), others in step(): do all ranks make equally many "
    "backward passes? One that leaves a pass out calls optimizer.synchronize() in its place",
    "steps": "do all ranks call step() and backward() equally often?",
    "tensors": "do all ranks freeze or add the same parameters?",
    "named": "in the first backward pass after a restart the ranks have used different optimizers; "
    "remedy: make them attributes of the elastic state, or use the same in all ranks' first passes",
}


class Consensus:
    """The call in which all ranks tell how they have closed a round: one optimizer's, by the name
    of its calls, which is valid in one world."""

    def __init__(self, process_set: int, world: int) -> None:
        """`world`: the present one; 0: it gets a name later."""
        self.scope = next_scope("optimizer", process_set) if world else "optimizer"
        self.world = world
        self.call = Call(Op.ALLREDUCE, f"{self.scope}.consensus", process_set, Max)
        shape = (2 * _COUNT - _LARGEST,)
        self._prepared = PreparedCall(self.call, Buffer(0, _INT64, shape, None))
        self._words = array("q")  # its memory; fields that must be equal are also sent negated
        self.equal_models = True  # in the round that was heard last
        self.left: list[int] = []  # handles of a failed round, which still use the names

    def begin(self) -> None:
        """To be called before the first tensor of a round is sent."""
        left, self.left = self.left, []
        for handle in left:
            outcome((handle,))

    def submit(self, state: RoundState) -> int:
        """Submits it, after all tensors; returns the core's handle."""
        self._words = words = array("q", [*state, *(-x for x in state[_LARGEST:])])
        address = words.buffer_info()[0]
        return leases.lend(self._prepared.start, address, address, words)

    def hear(self, handle: int) -> RoundState | Exception:
        """Waits; returns the result, or the error of all ranks."""
        if failure := outcome((handle,)):
            return failure
        state = RoundState(*self._words[:_COUNT])
        names = RoundState._fields[_LARGEST:]
        for field, high, low in zip(names, state[_LARGEST:], self._words[_COUNT:], strict=True):
            if field == "model":
                self.equal_models = high == -low
            elif high != -low:
                return MismatchError(
                    f"{self.scope}: ranks are not in the same optimizer step: {field} is {-low} on "
                    f"one rank, {high} on another; {_REMEDIES[field]}"
                )
        return state


def outcome(handles: Any) -> Exception | None:
    """Waits for calls of a round; returns the error of one."""
    code = wait_until(handles, None)
    return None if code == lib.FARANDOLE_OK else error(code)
