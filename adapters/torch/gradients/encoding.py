# SPDX-License-Identifier: Apache-2.0
"""A Gradient's form while it is sent: unchanged, compressed, made dense, or as rows. On autograd's
threads and the one that steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from farandole.calls.arguments import divisor_of
from farandole.calls.requests import Call, Op, PreparedCall
from farandole.ops import Average, Sum
from farandole.torch.bucket_view import BucketView
from farandole.torch.compression import Compression, Compressor
from farandole.torch.kind import prepare, receive
from farandole.torch.strides import like_gradient, sparse_sum

EACH = 2 << 10  # bytes added per gradient, so that at most 32 are sent by one call
_NOT_PLAIN: tuple[int, torch.dtype | None, torch.Size | None] = 0, None, None
_INDEX = torch.int64.itemsize


class Encoding:
    """Converts a gradient to the tensor that is sent and back; submits that tensor to the core.

    In each round a Gradient calls encode(), or receive() where it has nothing, then submit(), and
    decode() at the end.
    """

    __slots__ = (
        *("_compressor", "_context", "_group", "_key", "_prepared", "_sparse_as_dense"),
        *("_sparse_dim", "call", "form", "submit", "view", "weight"),
    )

    def __init__(
        self,
        call: Call,
        compressor: Compressor,
        sparse_as_dense: bool,
        group: tuple[str | None, int],
    ) -> None:
        """`group`: the group's name in calls and its number of members; `call` is refused if this
        rank can't make it."""
        self.call = call
        self._compressor = compressor
        self._sparse_as_dense = sparse_as_dense
        self._group = group
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
        # (input address, output address, what keeps them alive) -> handle
        self.submit: Callable[[int, int, object], int]

    @property
    def is_grouped(self) -> bool:
        """True if it is reduced with all members of its group or not at all."""
        return self._group[0] is not None

    def rows(self, like: Tensor, sparse_dim: int) -> Encoding:
        """The Rows to use from now on; closes the prepared call."""
        if self._prepared is not None:
            self._prepared.close()
        return Rows(self.call, self._group, like, sparse_dim)

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
        prepared = self._prepare(encoded)
        self.form, self.weight = _NOT_PLAIN, 0
        # Strides do not show a lazy view of complex tensors, or of one element.
        own = self._compressor is Compression.none and encoded is grad
        if own and not grad.is_complex() and grad.numel() > 1:
            on_cpu = prepared.current is None
            self.form = prepared.number if on_cpu else 0, grad.dtype, grad.shape
            self.weight = encoded.nbytes + EACH if on_cpu and self.view is None else 0
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
        return self._prepared.stream if self._prepared else 0

    def _check_rows(self) -> None:
        if self.call.reduce_op not in (Average, Sum):
            raise ValueError(
                f"{self.call.name}: a sparse gradient works with Average and Sum only; give "
                "sparse_as_dense=True to DistributedOptimizer, or build the layer with sparse=False"
            )

    def _prepare(self, encoded: Tensor) -> PreparedCall:
        key = (encoded.dtype, encoded.shape, encoded.device)
        prepared = self._prepared
        if prepared is None or key != self._key:
            if prepared is not None:
                prepared.close()
            prepared = prepare(self.call, encoded, self._group, in_place=True)
            self._prepared, self._key, self.form = prepared, key, _NOT_PLAIN
            self.submit, self.weight = prepared.submit, 0
        return prepared


class Rows(Encoding):
    """The Encoding of sparse gradients, whose rows are gathered from all ranks and added up.

    Each element is one row of bytes: its indices and uncompressed values. Dense gradients among
    sparse ones are made sparse.
    """

    stream = 0

    def __init__(
        self, call: Call, group: tuple[str | None, int], like: Tensor, sparse_dim: int
    ) -> None:
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
        call = prepare(self.call, self._rows, self._group, in_place=False)
        handle = call.submit(input, 0, memory)
        self.stream = call.stream
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
