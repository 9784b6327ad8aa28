# SPDX-License-Identifier: Apache-2.0
"""A round: what one backward pass, or step() in its place, has under way; and the consensus of all
ranks that ends it. For the Reducer and its Gradients, on the threads that send and wait."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from farandole._library import error, lib
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.calls import leases
from farandole.calls.handles import explanation, is_under_way, stall, wait_until
from farandole.calls.requests import Call, Op, PreparedCall, next_scope
from farandole.errors import MismatchError
from farandole.ops import Max

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Pass, Reducer

ROOM = 64 << 10  # most bytes that wait to be sent together; see Encoding.weight
_MOST_NAMES = 4  # of gradients, in an error's text
_INT64 = DTYPES.index("int64")

_taken, _handle = attrgetter("grad"), attrgetter("handle")
_form = attrgetter("encoding.form")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_dtype_of, _is_on_cpu = _base.dtype.__get__, _base.is_cpu.__get__
_users: Callable[[int], int] = torch._C._storage_Use_Count
_number_of = attrgetter("_cdata")
_ALONE = 2  # references to a storage that one tensor uses: the tensor's, and the caller's


def no_pass() -> None:
    """Round.inside of a round that belongs to no pass, or to one that has ended."""


class Round:
    """What a backward pass, or step() in its place, has under way. Gradients that arrive together
    are sent by one call, at a third of the cost of single calls.

    Made at its start and dropped at its end, so that none finds what another has left.
    """

    __slots__ = (
        *("again", "at_step", "batch", "closing", "inside", "late", "memory", "open"),
        *("reducer", "room", "sending", "sparse"),
    )

    def __init__(self, reducer: Reducer, at_step: bool = False, again: bool = False) -> None:
        """`at_step`: step() has started it; `again`: one of several rounds of the same pass."""
        self.reducer = reducer
        self.at_step = at_step
        self.again = again
        # A weak reference, from the first gradient of a pass to its end.
        self.inside: Callable[[], Pass | None] = no_pass
        self.open = False  # gradients may be under way
        self.closing = False  # the end of the pass closes it
        self.sending = False  # gradients that arrive are taken and sent
        self.late = False  # gradients have arrived after theirs had been sent
        self.sparse = 0  # as in RoundState
        self.batch: list[Gradient] = []  # of what was taken, to be sent together
        self.room = ROOM
        self.memory: set[int] = set()  # addresses of what is reduced in its own memory

    @property
    def is_broken_off(self) -> bool:
        """True if an exception has ended the pass that it belongs to."""
        return self.open and self.inside is not no_pass and self.inside() is None

    def send(self) -> None:
        """Sends what was taken and waits to be sent. Raises the core's error, on all ranks."""
        with self.reducer.lock:
            batch, self.batch, self.room = self.batch, [], ROOM
            if batch and (failure := self._send(batch)):
                raise self.reducer.refuse(failure)

    def _send(self, batch: list[Gradient]) -> Exception | None:
        """By one call; one by one if any can't be sent as it is. Returns the core's error."""
        grads = [*map(_taken, batch)]
        calls, dtypes, numels = zip(*map(_form, batch), strict=True)
        try:
            storages = [*map(Tensor.untyped_storage, grads)]
        except NotImplementedError:  # a gradient is sparse, and its parameter's last one was not
            storages = []
        if not (
            storages
            and (*map(_dtype_of, grads),) == dtypes
            and (*map(Tensor.numel, grads),) == numels
            and all(map(_is_on_cpu, grads))
            and all(map(Tensor.is_contiguous, grads))
            and have_own_memory(storages)
            and self._note(addresses := [*map(Tensor.data_ptr, grads)])
        ):
            for gradient in batch:
                if gradient.handle is None:
                    gradient.send()
            return None
        handles, failure = leases.lend_prepared(calls, addresses, storages)
        for gradient, handle in zip(batch, handles, strict=False):
            gradient.handle = handle
        return failure

    def _note(self, addresses: Sequence[int]) -> bool:
        """Notes memory that the round reduces; returns whether all of it is new."""
        before = len(self.memory)
        self.memory.update(addresses)
        return len(self.memory) == before + len(addresses)

    def claim(self, address: int, gradient: Gradient) -> None:
        """Notes memory that the round reduces. Raises RuntimeError if it is another's too."""
        if self._note([address]):
            return
        for other in self.reducer.gradients:
            x = other.grad
            if x is None or x.layout is not torch.strided or x.numel() == 0 or other is gradient:
                continue
            if x.data_ptr() == address:
                raise RuntimeError(
                    f"{gradient.name} and {other.name} have their gradients in the same memory; "
                    "give each parameter its own .grad"
                )


def have_own_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether one tensor alone uses each of them.

    If gradients pass only through views, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share memory.
    """
    return set(map(_users, map(_number_of, storages))) <= {_ALONE}


class Limit(NamedTuple):
    """The time limit of one wait."""

    seconds: float
    at: float | None  # time.monotonic() at its end; None: no limit

    @classmethod
    def of(cls, seconds: float | None) -> Limit:
        """From now on; None: no limit."""
        return cls(0.0, None) if seconds is None else cls(seconds, monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """Seconds."""
        return None if self.at is None else max(0.0, self.at - monotonic())


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
        self.handles: Any = None  # of the round under way, as int64_t[], once it is closed
        self.equal_models = True  # in the round that was heard last
        self.compared = False  # whether its differences, if any, are known
        self.unfinished: list[int] = []  # handles of a failed round, to be completed

    def begin(self) -> None:
        """To be called before the first tensor of a round is sent."""
        while self.unfinished:  # else their names would still be in use
            wait_until([self.unfinished[-1]], None)
            self.unfinished.pop()

    def close(self, state: RoundState, sent: Iterable[Gradient]) -> None:
        """Submits it, after all tensors. Does not wait."""
        self.compared = False
        self._words = words = array("q", [*state, *(-x for x in state[_LARGEST:])])
        address = words.buffer_info()[0]
        own = leases.lend(self._prepared.start, address, address, words)
        self.handles = leases.numbers_of([*map(_handle, sent), own])

    def hear(self, limit: Limit, sent: list[Gradient]) -> Exception | RoundState:
        """Waits; returns the result, or the error. Raises StallError at the limit; it may be called
        again then."""
        if failure := self.wait([self.handles[len(self.handles) - 1]], limit, sent):
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

    def wait(self, handles: Any, limit: Limit, sent: list[Gradient]) -> Exception | None:
        """Waits for calls of a round in which these gradients are; as hear()."""
        code = wait_until(handles, limit.at)
        if code == lib.FARANDOLE_PENDING:
            missing = [g for g in sent if is_under_way(g.handle or 0)]
            names = ", ".join(g.name for g in missing[:_MOST_NAMES])
            if len(missing) > _MOST_NAMES:
                names += f" and {len(missing) - _MOST_NAMES} more"
            what = f"gradients of {names}" if missing else "all ranks' step()"
            why = explanation([g.handle or 0 for g in missing] or handles)
            raise stall(f"{self.scope}: {what}", limit.seconds, why)
        return None if code == lib.FARANDOLE_OK else error(code)
