# SPDX-License-Identifier: Apache-2.0
"""A Gradient's form while it is sent: unchanged, compressed, made dense, or as rows. On autograd's
threads and the one that steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.arrays.buffers import EMPTY
from farandole.calls.arguments import divisor_of
from farandole.calls.requests import Call, Op, Part, PreparedCall
from farandole.ops import Average, Sum
from farandole.torch import cuda
from farandole.torch.bucket_view import BucketView
from farandole.torch.compression import Compression, Compressor
from farandole.torch.kind import describe, prepare, receive
from farandole.torch.strides import like_gradient, sparse_sum

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient

EACH = 2 << 10  # bytes added per gradient, so that at most 32 are sent by one call
_NOT_PLAIN: tuple[int, torch.dtype | None, torch.Size | None] = 0, None, None
_INDEX = torch.int64.itemsize


class Group:
    """Gradients that are reduced by one call, which is submitted when all of them are there."""

    __slots__ = ("_parts", "_prepared", "_waiting", "call", "members")

    def __init__(self, call: Call) -> None:
        """`call` is that of all, to be refused if this rank can't make it."""
        self.call = call
        self.members: list[Gradient] = []  # in the same order on all ranks
        self._waiting: dict[Encoding, tuple[Part, int, int, int, object]] = {}
        self._parts: list[Part] = []
        self._prepared: PreparedCall | None = None  # for these

    def take(
        self, whose: Encoding, part: Part, input: int, output: int, stream: int, memory: object
    ) -> int:
        """Takes one member's tensor; the last one submits all. Returns the core's handle; 0: it is
        not known yet."""
        self._waiting[whose] = part, input, output, stream, memory
        if len(self._waiting) < len(self.members):
            return 0
        taken = [self._waiting.pop(gradient.encoding) for gradient in self.members]
        parts, inputs, outputs, streams, memories = map(list, zip(*taken, strict=True))
        if self._prepared is None or parts != self._parts:
            first = replace(parts[0][0], name=self.call.name)
            self._prepared = PreparedCall(first, parts[0][1], parts[1:])
            self._parts = parts
        numbers = self._prepared.submit_group(inputs, outputs, streams, memories)
        for gradient, number in zip(self.members, numbers, strict=True):
            gradient.handle = number
        return next(g.handle or 0 for g in self.members if g.encoding is whose)

    def forget(self) -> None:
        """Forgets the tensors that wait for others: the round is over."""
        self._waiting.clear()


class Encoding:
    """Converts a gradient to the tensor that is sent and back; submits that tensor to the core.

    In each round a Gradient calls encode(), or receive() where it has nothing, then submit(), and
    decode() at the end.
    """

    __slots__ = (
        *("_compressor", "_context", "_key", "_part", "_prepared", "_sparse_as_dense"),
        *("_sparse_dim", "_stream", "call", "form", "group", "submit", "view", "weight"),
    )

    def __init__(
        self,
        call: Call,
        compressor: Compressor,
        sparse_as_dense: bool,
        group: Group | None,
    ) -> None:
        """`group`: with which it is reduced, or not at all; None: alone."""
        self.call = call
        self._compressor = compressor
        self._sparse_as_dense = sparse_as_dense
        self.group = group
        self._part: Part | None = None  # of the group's call
        self._stream = 0  # of the group's last submission
        self._context: Any = None
        self._sparse_dim: int | None = None
        self._prepared: PreparedCall | None = None
        self._key: tuple[torch.dtype, torch.Size, torch.device] | None = None  # what that is for
        self.view: BucketView | None = None  # where gradients are to be; None: torch's own memory
        # For gradients that are sent unchanged: the core's number of the call, dtype, shape.
        self.form = _NOT_PLAIN
        # A gradient's share of the bytes that are sent by one call, if those of this form are
        # reduced in place on the CPU. 0: they are not, or it is not known yet.
        self.weight = 0
        # (input address, output address, what keeps them alive) -> handle; 0: its group waits
        self.submit: Callable[[int, int, object], int]

    @property
    def whole(self) -> Call:
        """The call that carries it, to be refused if this rank can't make it."""
        return self.call if self.group is None else self.group.call

    def rows(self, like: Tensor, sparse_dim: int) -> Encoding:
        """The Rows to use from now on; closes the prepared call."""
        if self._prepared is not None:
            self._prepared.close()
        return Rows(self.call, self.group, like, sparse_dim)

    def use_view(self, view: BucketView | None) -> None:
        """Sets the memory where gradients are to be."""
        self.view = view
        self.form, self.weight = _NOT_PLAIN, 0

    def carries(self, grad: Tensor) -> bool:
        """Whether `grad` has the same form and device as the last one, which was sent unchanged."""
        if self._key is None or (grad.dtype, grad.shape) != self.form[1:]:
            return False
        return grad.device == self._key[2] and grad.is_contiguous() and not grad.is_neg()

    def encode(self, grad: Tensor) -> Tensor | None:
        """The tensor to send, `grad` itself if possible; None: sparse, without sparse_as_dense.

        Raises ValueError if sparse gradients can't be reduced by the op.
        """
        if self.carries(grad):
            return grad
        dense = grad
        if grad.layout is not torch.strided:
            if not self._sparse_as_dense:
                self._check_rows()
                return None
            self._sparse_dim = grad.sparse_dim()
            dense = grad.to_dense()
        encoded, self._context = self._compressor.compress(dense)
        encoded = encoded.resolve_conj().resolve_neg().contiguous()
        self._prepare(encoded)
        self.form, self.weight = _NOT_PLAIN, 0
        # Strides do not show a lazy view of complex tensors, or of one element.
        own = self._compressor is Compression.none and encoded is grad
        if own and not grad.is_complex() and grad.numel() > 1:
            prepared = self._prepared if grad.is_cpu else None
            self.form = 0 if prepared is None else prepared.number, grad.dtype, grad.shape
            batched = prepared is not None and self.view is None
            self.weight = encoded.nbytes + EACH if batched else 0
        return encoded

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor for the result, if this rank sends nothing."""
        like = like_gradient(parameter)
        if self._compressor is Compression.none:
            contiguous = parameter.is_contiguous()  # by strides of its own where a size is 1
            order = torch.preserve_format if contiguous else torch.contiguous_format
            encoded = torch.empty_like(parameter, dtype=like.dtype, memory_format=order)
        else:
            encoded, self._context = self._compressor.compress(torch.zeros_like(like))
            encoded = encoded.contiguous()
        self._prepare(encoded)
        return encoded

    def decode(self, encoded: Tensor, _handle: int) -> Tensor:
        """The result, decompressed, and sparse if the gradient was."""
        if self._compressor is not Compression.none:
            encoded = self._compressor.decompress(encoded, self._context)
        return encoded if self._sparse_dim is None else encoded.to_sparse(self._sparse_dim)

    @property
    def stream(self) -> int:
        """The CUDA stream of the last submission; 0 on the CPU."""
        return self._prepared.stream if self._prepared else self._stream

    def _check_rows(self) -> None:
        if self.call.reduce_op not in (Average, Sum):
            raise ValueError(
                f"{self.call.name}: a sparse gradient works with Average and Sum only; give "
                "sparse_as_dense=True to DistributedOptimizer, or build the layer with sparse=False"
            )

    def _prepare(self, encoded: Tensor) -> None:
        key = (encoded.dtype, encoded.shape, encoded.device)
        if key == self._key:
            return
        if self.group is not None:
            self._part = _part(self.call, encoded)
            self.submit = self._wait_for_group
        else:
            if self._prepared is not None:
                self._prepared.close()
            self._prepared = prepare(self.call, encoded, in_place=True)
            self.submit = self._prepared.submit
        self._key, self.form, self.weight = key, _NOT_PLAIN, 0

    def _wait_for_group(self, input: int, output: int, memory: object) -> int:
        assert self.group is not None
        assert self._part is not None
        device = self._part[1].device
        self._stream = cuda.current_stream(device) if device >= 0 else 0
        return self.group.take(self, self._part, input, output, self._stream, memory)


def _part(call: Call, like: Tensor) -> Part:
    return call, replace(describe(like), pointer=EMPTY, owner=None, stream=0)


class Rows(Encoding):
    """The Encoding of sparse gradients, whose rows are gathered from all ranks and added up.

    Each element is one row of bytes: its indices and uncompressed values. Dense gradients among
    sparse ones are made sparse.
    """

    def __init__(self, call: Call, group: Group | None, like: Tensor, sparse_dim: int) -> None:
        """`call` is that of the dense form; `like` has the gradients' shape and dtype."""
        gather = replace(call, op=Op.ALLGATHER, name=f"{call.name}.rows", reduce_op=1)
        super().__init__(gather, Compression.none, False, group)
        self._like = like.detach()
        self._dims = sparse_dim
        divisor = divisor_of(call.reduce_op, call.process_set)
        self._factor = call.prescale * call.postscale / divisor
        self._rows = self._none(like)

    def _none(self, like: Tensor) -> Tensor:
        width = self._dims * _INDEX + prod(like.shape[self._dims :]) * like.element_size()
        return torch.empty((0, width), dtype=torch.uint8, device=like.device)

    def rows(self, _like: Tensor, _sparse_dim: int) -> Encoding:
        """Itself."""
        return self

    def encode(self, grad: Tensor) -> Tensor:
        """The gradient's rows, duplicates added up."""
        x = grad.detach()
        x = (x if x.is_sparse else x.to_sparse(self._dims)).coalesce()
        values = x.values().reshape(x.values().shape[0], prod(x.values().shape[1:]))
        self._rows = torch.cat([_as(x.indices().t(), torch.uint8), _as(values, torch.uint8)], 1)
        return self._rows

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor of no rows, since this rank sends nothing."""
        self._rows = self._none(like_gradient(parameter))
        return self._rows

    def submit(self, input: int, _output: int, memory: object) -> int:
        """Gathers the last tensor of encode(); `input` 0: sends nothing. Returns a handle."""
        if self.group is not None:
            self._part = _part(self.call, self._rows)
            return self._wait_for_group(input, 0, memory)
        call = prepare(self.call, self._rows, in_place=False)
        handle = call.submit(input, 0, memory)
        self._stream = call.stream
        call.close()
        return handle

    def decode(self, _wire: Tensor, handle: int) -> Tensor:
        """The sum or average of a finished handle: sparse, coalesced."""
        rows, split, like = receive(handle, self._rows), self._dims * _INDEX, self._like
        indices = _as(rows[:, :split], torch.int64).t()
        values = _as(rows[:, split:], like.dtype).reshape(len(rows), *like.shape[self._dims :])
        total = sparse_sum(indices, values, like.shape, self.call.name)
        return total if self._factor == 1.0 else total.mul_(self._factor)


def _as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as `dtype`, copied since view() refuses some strides."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
