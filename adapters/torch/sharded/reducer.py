# SPDX-License-Identifier: Apache-2.0
"""The reducer of a sharded optimizer: gradients are reduce-scattered in the backward pass, and each
rank keeps a part. Used by ShardedOptimizer; threads as in Reducer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from farandole import ops
from farandole.calls import leases
from farandole.calls.handles import wait_until
from farandole.calls.requests import Call, Op
from farandole.members import ProcessSet
from farandole.ops import Max
from farandole.torch.arguments import Settings
from farandole.torch.gradients.encoding import Encoding, Sending
from farandole.torch.gradients.gradient import Gradient
from farandole.torch.gradients.passes import Passes
from farandole.torch.gradients.reducer import Reducer
from farandole.torch.kind import prepare
from farandole.torch.sharded.grad import ShardedGrad
from farandole.torch.sharded.layout import Part

ROOM = 32 << 20  # bytes of whole gradients that may be under way
_PATIENCE = 0.5  # seconds of the longest wait for room


class ShardEncoding(Encoding):
    """Sends a gradient of which this rank receives its part."""

    __slots__ = ("_form", "_grad_of", "_part")

    def __init__(self, part: Part, grad_of: Callable[[Tensor], Tensor], *plain: Any) -> None:
        """`grad_of` makes a ShardedGrad of a part; `plain`: arguments of an Encoding."""
        super().__init__(*plain)
        self._part = part
        self._grad_of = grad_of
        self._form: tuple[torch.dtype, torch.device] | None = None  # of what is sent

    def encode(self, grad: Tensor) -> Tensor:
        """The elements to send, in the order of the parameter's memory; `grad`'s own if possible.

        Raises TypeError for a sparse gradient, ValueError for one of another shape.
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
        wire, self._context = self._compressor.compress(self._part.flat(grad))
        self._prepare(wire)
        return wire

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor for this rank's part, in the form that is sent."""
        few = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        wire, self._context = self._compressor.compress(few)
        self._prepare(wire)
        return self.target(wire)

    def target(self, sent: Tensor) -> Tensor:
        """A tensor for this rank's part."""
        return torch.empty(self._part.count, dtype=sent.dtype, device=sent.device)

    def decode(self, wire: Tensor, _handle: int) -> Tensor:
        """The gradient of which this rank has received its part."""
        return self._grad_of(self._compressor.decompress(wire, self._context))

    def _prepare(self, wire: Tensor) -> None:
        form = (wire.dtype, wire.device)
        if form != self._form:
            if self._tensor is not None:
                self._tensor.close()
            sent = self._part.sent
            self._tensor = prepare(self._call, wire, self._group, in_place=False, shape=sent)
            self._form = form
            self.submit = self._tensor.submit


class ShardGradient(Gradient):
    """As Gradient; the whole gradient's memory is released as soon as it has been reduced.

    Autograd can't add to a ShardedGrad, so that is set aside before: the result is added to it.
    """

    in_place = False  # it is read only, and its memory may be another's in the same round

    __slots__ = ("_node",)

    def hook(self) -> None:
        """As in Gradient; also before each accumulation."""
        super().hook()
        with torch.inference_mode(False), torch.enable_grad():
            p: Any = self.parameter
            self._node = p.expand_as(p).grad_fn.next_functions[0][0]
        after, before = self.remove, self._node.register_prehook(self._before).remove

        def remove() -> None:
            before()
            if after is not None:
                after()

        self.remove = remove

    def _before(self, _gradients: Any = None) -> None:
        grad = self.parameter.grad
        if self.grad is None and isinstance(grad, ShardedGrad):
            self.base, self.parameter.grad = grad, None
        elif self.grad is None and grad is None and not self.reducer.now.again:
            self.base = None  # reset by the user

    def take(self) -> None:
        """As in Gradient; what is reduced already is not sent again."""
        self._before()
        super().take()

    def _submit(self, input: int, output: Tensor, memory: object) -> None:
        super()._submit(input, output, memory)
        if input and self.handle is not None:
            self.grad = output
            reducer: Any = self.reducer
            reducer.note_sent(self.handle, output, self.parameter.nbytes)


class ShardReducer(Reducer):
    """As Reducer, for gradients of which each rank keeps its part."""

    _kind = ShardGradient

    def __init__(
        self, settings: Settings, passes: Passes, process_set: ProcessSet, parts: dict[int, Part]
    ) -> None:
        """`parts`: by the parameter's id; the others as in Reducer."""
        super().__init__(settings, passes, self._shards)
        self._process_set = process_set
        self._parts = parts
        self._place = (process_set.rank(), process_set.size())
        self._under_way: deque[tuple[int, object, int]] = deque()  # handle, what is kept, bytes
        self._bytes = 0  # under way
        self._patience = _PATIENCE

    def _shards(
        self, call: Call, group: tuple[str | None, int], parameter: Tensor, name: str
    ) -> Sending:
        def grad_of(shard: Tensor) -> ShardedGrad:
            return ShardedGrad(parameter, shard, name, self.agree_on_overflow)

        call, s = replace(call, op=Op.REDUCESCATTER), self.settings
        plain = call, s.compressor_of(name, parameter), s.sparse_as_dense, group
        return ShardEncoding(self._parts[id(parameter)], grad_of, *plain)

    def note_sent(self, handle: int, kept: object, nbytes: int) -> None:
        """Releases gradients that have been reduced, but for what is kept of each.

        Where reductions are slower than the backward pass it waits for the oldest one, so that
        about ROOM bytes are under way. In vain if another rank sends later what comes first here:
        each such wait makes the next one shorter.
        """
        waiting = self._under_way
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

    def begin(self) -> None:
        """As in Reducer. Raises RuntimeError if this rank's part has become another one."""
        if self.round.epoch != leases.epoch():
            self.check_place()
        self._under_way.clear()
        self._bytes = 0
        super().begin()

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
        flag = found.detach().to("cpu", torch.float32).reshape(1).contiguous()
        name = f"{self.round.scope}.overflow"
        ops.allreduce_(flag, op=Max, name=name, process_set=self._process_set)
        found.fill_(flag.item())
