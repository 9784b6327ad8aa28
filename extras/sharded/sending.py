# SPDX-License-Identifier: Apache-2.0
"""How a sharded optimizer's gradients are sent: reduce-scattered in the backward pass, so that each
rank keeps a part. On autograd's threads and the one that steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from farandole import ProcessSet
from farandole.extension import (
    Call,
    Op,
    Scope,
    generation,
    is_absent,
    leases,
    wait_until,
)
from farandole.extras.sharded.grad import ShardedGrad
from farandole.extras.sharded.layout import MEETING, Part
from farandole.torch.extension import Sending, largest_flag, prepare

ROOM = 32 << 20  # bytes of whole gradients that may be under way
_PATIENCE = 0.5  # seconds of the longest wait for room


class Shard:
    """What this rank keeps of one parameter's gradient.

    Autograd can't add to a ShardedGrad, so that is set aside before: the result is added to it.
    """

    def __init__(self, parameter: Tensor, part: Part) -> None:
        self.parameter = parameter
        self.part = part
        self.base: ShardedGrad | None = None  # set aside
        self.under_way = False  # what has arrived since is being reduced
        self._node: Any = None  # autograd's, which accumulates
        self.unwatch: Callable[[], object] = lambda: None

    def watch(self) -> None:
        """From now on a ShardedGrad is set aside before each accumulation."""
        if self._node is None and self.parameter.requires_grad:
            with torch.inference_mode(False), torch.enable_grad():
                p: Any = self.parameter
                self._node = p.expand_as(p).grad_fn.next_functions[0][0]
            before = self._node.register_prehook(self.set_aside)
            after = p.register_post_accumulate_grad_hook(self._put_back)  # runs after the reducer's
            self.unwatch = lambda: (before.remove(), after.remove())

    def set_aside(self, _gradients: object = None) -> None:
        """Takes `.grad` if it is reduced already."""
        grad = self.parameter.grad
        if isinstance(grad, ShardedGrad):
            self.base, self.parameter.grad = grad, None
        elif grad is None and not self.under_way:
            self.base = None  # reset by the user

    def _put_back(self, parameter: Tensor) -> None:
        """Puts back what was set aside, if autograd has come by without a gradient."""
        if parameter.grad is None and not self.under_way:
            parameter.grad, self.base = self.base, None


class Shards:
    """What the gradients of one sharded optimizer have in common."""

    def __init__(
        self,
        process_set: ProcessSet,
        compressor_of: Callable[[str, Tensor], Any],
        shards: Iterable[Shard],
    ) -> None:
        self._process_set = process_set
        self._compressor_of = compressor_of
        self._scope = Scope(MEETING, process_set)
        self._scope.name  # noqa: B018  # in the order in which optimizers are made
        self._shards = {id(shard.parameter): shard for shard in shards}
        self._place = (process_set.rank(), process_set.size())
        self._generation = generation()
        self._under_way: deque[tuple[int, object, int]] = deque()  # handle, what is kept, bytes
        self._bytes = 0  # under way
        self._patience = _PATIENCE

    @property
    def scope(self) -> str:
        """The optimizer's name in calls; changes after shutdown() and init()."""
        return self._scope.name

    def sending(
        self,
        sparse_as_dense: bool,
        call: Call,
        group: tuple[str | None, int],
        parameter: Tensor,
        name: str,
    ) -> Sending:
        """Makes what sends a parameter's gradients."""
        shard = self._shards[id(parameter)]
        plain = self._compressor_of(name, parameter), sparse_as_dense, group
        return ShardSending(self, shard, replace(call, op=Op.REDUCESCATTER), name, *plain)

    def forget(self) -> None:
        """Forgets what was set aside, when gradients are reset."""
        for shard in self._shards.values():
            shard.base = None

    def unwatch(self) -> None:
        """Removes the hooks, when the optimizer is gone."""
        for shard in self._shards.values():
            shard.unwatch()

    def note_sent(self, handle: int, kept: object, nbytes: int) -> None:
        """Releases gradients that have been reduced, but for what is kept of each.

        If reductions are slower than the backward pass it waits for the oldest one, so that about
        ROOM bytes are under way. The wait is in vain if another rank sends later what comes first
        here: each such wait makes the next one shorter.
        """
        waiting = self._under_way
        if self._generation != generation():
            self._generation, self._bytes = generation(), 0
            waiting.clear()
        waiting.append((handle, kept, nbytes))
        self._bytes += nbytes
        while waiting:
            oldest, memory, nbytes = waiting[0]
            full = self._bytes > ROOM
            if full:
                wait_until([oldest], monotonic() + self._patience)
            if not leases.narrow(oldest, memory):
                self._patience /= 4 if full else 1
                return
            self._patience = min(_PATIENCE, 2 * self._patience)
            waiting.popleft()
            self._bytes -= nbytes

    def check_place(self) -> None:
        """Raises RuntimeError if init() has given this rank another place than before."""
        place = (self._process_set.rank(), self._process_set.size())
        if place != self._place:
            raise RuntimeError(
                f"this optimizer's state was divided for rank {self._place[0]} of "
                f"{self._place[1]}, and this is rank {place[0]} of {place[1]} since the last "
                "init(): make a new DistributedOptimizer, and load merge_sharded_state_dicts() of "
                "all parts"
            )

    def agree_on_overflow(self, found: Tensor) -> None:
        """Makes a GradScaler's flag the largest of all ranks'; collective."""
        found.fill_(largest_flag(found, f"{self.scope}.overflow", self._process_set))


class ShardSending(Sending):
    """Sends a gradient of which this rank receives its part."""

    in_place = False  # it is read only, and its memory may be another's in the same round

    def __init__(
        self,
        shards: Shards,
        shard: Shard,
        call: Call,
        name: str,
        compressor: Any,
        sparse_as_dense: bool,
        group: tuple[str | None, int],
    ) -> None:
        """`group`: the group's name in calls and its number of members."""
        self._shards = shards
        self._shard = shard
        self._part = shard.part
        self.call = call
        self._name = name
        self._compressor = compressor
        self._sparse_as_dense = sparse_as_dense
        self._group = group
        self.grouped = group[0] is not None
        self._context: Any = None  # of the compressor
        self._form: tuple[torch.dtype, torch.device] | None = None  # of what is sent
        self._prepared: Any = None

    def set_aside(self) -> None:
        """Takes `.grad` away if it is reduced already."""
        self._shard.set_aside()

    def encode(self, grad: Tensor) -> Tensor:
        """The elements to send, in the order of the parameter's memory; `grad`'s own if possible.

        Raises TypeError for a sparse gradient, ValueError for one of a different shape.
        """
        if grad.layout is not torch.strided:
            if not self._sparse_as_dense:
                raise TypeError(
                    "it is sparse, and its rows can't be divided over the ranks: give "
                    "sparse_as_dense=True to DistributedOptimizer, or leave shard_state out"
                )
            grad = grad.to_dense()
        if grad.shape != self._part.shape:
            raise ValueError(
                f"its shape is {tuple(grad.shape)}, and was {self._part.shape} when the optimizer "
                "was made"
            )
        grad = grad.resolve_conj().resolve_neg()
        return self._compressed(self._part.flat(grad))

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor for this rank's part, in the form that is sent."""
        few = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return self.target(self._compressed(few))

    def target(self, sent: Tensor) -> Tensor:
        """A tensor for this rank's part."""
        return torch.empty(self._part.count, dtype=sent.dtype, device=sent.device)

    def submit(self, input: int, output: int, memory: Any, made: list[int]) -> int:
        """Submits what encode() has returned; `input` 0: nothing. Returns a handle."""
        self._shard.under_way = True
        handle: int = self._prepared.submit(input, output, memory, made)
        self.stream = self._prepared.stream
        if input:
            self._shards.note_sent(handle, memory[0], self._shard.parameter.nbytes)
        return handle

    def missing(self, handle: int) -> bool:
        """Whether there is nothing at all."""
        return self._shard.base is None and is_absent(handle)

    def decode(self, encoded: Tensor, handle: int) -> Tensor:
        """The gradient of which this rank has received its part, and what was set aside."""
        shard, base = self._shard, self._shard.base
        shard.watch()
        if base is not None and is_absent(handle):
            return base
        part = self._compressor.decompress(encoded, self._context)
        new = ShardedGrad(shard.parameter, part, self._name, self._shards.agree_on_overflow)
        return new if base is None else base + new

    def end(self) -> None:
        """Drops what was set aside: the round is over."""
        self._shard.base, self._shard.under_way = None, False

    def _compressed(self, elements: Tensor) -> Tensor:
        """What is sent of some elements; makes submit() usable."""
        encoded: Tensor
        encoded, self._context = self._compressor.compress(elements)
        form = (encoded.dtype, encoded.device)
        if form != self._form:
            self._shards.check_place()
            if self._prepared is not None:
                self._prepared.close()
            sent = self._part.sent
            self._prepared = prepare(self.call, encoded, self._group, in_place=False, shape=sent)
            self._form = form
        return encoded
