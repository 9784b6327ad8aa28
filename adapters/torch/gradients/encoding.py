# SPDX-License-Identifier: Apache-2.0
"""The form in which a gradient is sent: unchanged, compressed, made dense, or as rows.

The code runs on autograd's threads and on the thread that calls optimizer.step().
"""

from __future__ import annotations

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

_BATCH_BYTES = 64 << 10  # largest total size of the gradients that one call sends together
_OVERHEAD = 2 << 10  # added to each gradient's size, so that one call sends at most 32
_NOT_PLAIN: tuple[int, torch.dtype | None, torch.Size | None] = 0, None, None
_INDEX_BYTES = torch.int64.itemsize


class Encoding:
    """Converts a gradient to the tensor that is sent, submits that tensor, and converts it back.

    In each round, a Gradient calls encode(), or receive() if this rank has no gradient. The
    Gradient then calls submit(), and at the end of the round it calls decode().
    """

    __slots__ = (
        *("_compressor", "_context", "_key", "_prepared", "_sparse_as_dense", "_sparse_dim"),
        *("batch_limit", "call", "form", "view"),
    )

    def __init__(self, call: Call, compressor: Compressor, sparse_as_dense: bool) -> None:
        """`call` sends the dense form. If a rank cannot make this call, the rank must refuse it."""
        self.call = call
        self._compressor = compressor
        self._sparse_as_dense = sparse_as_dense
        self._context: Any = None
        self._sparse_dim: int | None = None
        self._prepared: PreparedCall | None = None
        self._key: tuple[torch.dtype, torch.Size, torch.device] | None = None  # form of _prepared
        # The memory that gradients must lie in, or None if they may lie anywhere.
        self.view: BucketView | None = None
        # The core's number of the call, the dtype and the shape of the last gradient, if that
        # gradient was sent unchanged.
        self.form = _NOT_PLAIN
        # Number of gradients of this form that one call may send together, or 0 if none was sent
        # yet or if they are not reduced in place on the CPU.
        self.batch_limit = 0

    def rows(self, like: Tensor, sparse_dim: int) -> Encoding:
        """Closes the prepared call, and returns the encoding for sparse gradients from now on."""
        if self._prepared is not None:
            self._prepared.close()
        return Rows(self.call, like, sparse_dim)

    def use_view(self, view: BucketView | None) -> None:
        """Sets the memory that gradients must lie in. None means any memory."""
        self.view = view
        self.form, self.batch_limit = _NOT_PLAIN, 0

    def is_plain(self, grad: Tensor) -> bool:
        """Returns True if `grad` has the form of the last gradient, which was sent unchanged."""
        if self._key is None or (grad.dtype, grad.shape) != self.form[1:]:
            return False
        return grad.device == self._key[2] and grad.is_contiguous() and not grad.is_neg()

    def encode(self, grad: Tensor) -> Tensor | None:
        """Returns the tensor to send, which is `grad` itself if possible.

        Returns None if the gradient is sparse, unless sparse_as_dense is set. Raises ValueError if
        the op cannot reduce sparse gradients.
        """
        if self.is_plain(grad):
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
        self.form, self.batch_limit = _NOT_PLAIN, 0
        # is_plain() does not notice lazy conjugation, or a one-element gradient that is a view.
        own = self._compressor is Compression.none and encoded is grad
        if own and not grad.is_complex() and grad.numel() > 1:
            self.form = self._made.number, grad.dtype, grad.shape
            if grad.is_cpu and self.view is None:
                self.batch_limit = max(1, _BATCH_BYTES // (encoded.nbytes + _OVERHEAD))
        return encoded

    def receive(self, parameter: Tensor) -> Tensor:
        """Returns a tensor for the result. Call this if this rank has no gradient."""
        like = like_gradient(parameter)
        if self._compressor is Compression.none:
            # A dimension of size 1 may have any stride.
            contiguous = parameter.is_contiguous()
            order = torch.preserve_format if contiguous else torch.contiguous_format
            encoded = torch.empty_like(parameter, dtype=like.dtype, memory_format=order)
        else:
            encoded, self._context = self._compressor.compress(torch.zeros_like(like))
            encoded = encoded.contiguous()
        self._prepare(encoded)
        return encoded

    def decode(self, encoded: Tensor, _handle: int) -> Tensor:
        """Returns the reduced gradient, decompressed. It is sparse if the sent gradient was."""
        if self._compressor is not Compression.none:
            encoded = self._compressor.decompress(encoded, self._context)
        return encoded if self._sparse_dim is None else encoded.to_sparse(self._sparse_dim)

    def submit(self, input: int, output: int, memory: object) -> int:
        """Submits the tensor at these addresses. Returns the core's handle.

        `input` is 0 if this rank has no gradient. `memory` keeps the tensor alive.
        """
        return self._made.submit(input, output, memory)

    @property
    def stream(self) -> int:
        """The CUDA stream of the last submission, or 0 on the CPU."""
        return self._made.stream

    @property
    def _made(self) -> PreparedCall:
        assert self._prepared is not None
        return self._prepared

    def _check_rows(self) -> None:
        if self.call.reduce_op not in (Average, Sum):
            raise ValueError(
                f"{self.call.name}: a sparse gradient works with Average and Sum only; pass "
                "sparse_as_dense=True to DistributedOptimizer, or build the layer with sparse=False"
            )

    def _prepare(self, encoded: Tensor) -> None:
        key = (encoded.dtype, encoded.shape, encoded.device)
        if key == self._key:
            return
        if self._prepared is not None:
            self._prepared.close()
        self._prepared = prepare(self.call, encoded, in_place=True)
        self._key, self.form, self.batch_limit = key, _NOT_PLAIN, 0


class Rows(Encoding):
    """Sends sparse gradients. Gathers the elements of all ranks, then adds them up.

    Each element is sent as one row of bytes, which holds the element's indices, then its
    uncompressed values. Dense gradients are first converted to sparse ones.
    """

    __slots__ = ("_factor", "_rows")

    def __init__(self, call: Call, like: Tensor, sparse_dim: int) -> None:
        """`call` sends the dense form. `like` is a tensor with the gradient's shape and dtype."""
        gather = replace(call, op=Op.ALLGATHER, name=f"{call.name}.rows", reduce_op=1)
        super().__init__(gather, Compression.none, False)
        self._key = like.dtype, like.shape, like.device
        self._sparse_dim: int = sparse_dim
        divisor = divisor_of(call.reduce_op, call.process_set)
        self._factor = call.prescale * call.postscale / divisor
        self._rows = self._no_rows(like)

    def _no_rows(self, like: Tensor) -> Tensor:
        width = self._sparse_dim * _INDEX_BYTES
        width += prod(like.shape[self._sparse_dim :]) * like.element_size()
        return torch.empty((0, width), dtype=torch.uint8, device=like.device)

    def rows(self, _like: Tensor, _sparse_dim: int) -> Encoding:
        """Returns this object, which already sends rows."""
        return self

    def encode(self, grad: Tensor) -> Tensor:
        """Returns the gradient's rows. Elements with the same indices are added up."""
        x = grad.detach()
        x = (x if x.is_sparse else x.to_sparse(self._sparse_dim)).coalesce()
        values = x.values().reshape(x.values().shape[0], prod(x.values().shape[1:]))
        self._rows = torch.cat([_as(x.indices().t(), torch.uint8), _as(values, torch.uint8)], 1)
        return self._rows

    def receive(self, parameter: Tensor) -> Tensor:
        """Returns a tensor that has no rows, because this rank has no gradient."""
        self._rows = self._no_rows(like_gradient(parameter))
        return self._rows

    def submit(self, input: int, _output: int, memory: object) -> int:
        """Gathers the tensor that encode() or receive() has returned."""
        self._prepared = prepare(self.call, self._rows, in_place=False)
        return self._prepared.submit(input, 0, memory)

    def decode(self, _encoded: Tensor, handle: int) -> Tensor:
        """Returns the sum or average of all ranks' elements, as a coalesced sparse tensor."""
        assert self._key is not None
        dtype, shape, _ = self._key
        rows, split = receive(handle, self._rows), self._sparse_dim * _INDEX_BYTES
        indices = _as(rows[:, :split], torch.int64).t()
        values = _as(rows[:, split:], dtype).reshape(len(rows), *shape[self._sparse_dim :])
        total = sparse_sum(indices, values, shape, self.call.name)
        return total if self._factor == 1.0 else total.mul_(self._factor)


def _as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads the bytes of each row as `dtype`. Copies the rows, as view() rejects some strides."""
    width = rows.shape[1] * rows.element_size() // dtype.itemsize
    flat = rows.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(dtype).view(len(rows), width)
