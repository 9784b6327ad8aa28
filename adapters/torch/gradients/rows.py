# SPDX-License-Identifier: Apache-2.0
"""How a sparse Gradient is sent: one row of bytes per element, with its indices and values. Takes
the place of the Gradient's Encoding."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from farandole.calls.arguments import divisor_of
from farandole.calls.requests import Call, Op
from farandole.torch.compression import Compression
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.kind import prepare, receive
from farandole.torch.strides import like_gradient, sparse_sum

_INDEX = torch.int64.itemsize


def no_rows(like: Tensor, sparse_dim: int) -> Tensor:
    """What a rank without elements sends for a tensor like `like`: uint8, (0, bytes of a row)."""
    values = prod(like.shape[sparse_dim:]) * like.element_size()
    return torch.empty((0, sparse_dim * _INDEX + values), dtype=torch.uint8, device=like.device)


def pack(x: Tensor, sparse_dim: int) -> Tensor:
    """The rows of `x`, duplicates added up: uint8, (elements, bytes of a row). Dense `x` too."""
    rows = x.detach() if x.is_sparse else x.detach().to_sparse(sparse_dim)
    rows = rows.coalesce()
    count, width = rows.values().shape[0], prod(rows.values().shape[1:])
    values = rows.values().reshape(count, width)
    return torch.cat([_packed(rows.indices().t(), torch.uint8), _packed(values, torch.uint8)], 1)


def unpack(rows: Tensor, like: Tensor, sparse_dim: int, name: str | None) -> Tensor:
    """The coalesced sum of packed rows of the tensor `name`, of `like`'s dtype and shape."""
    split = sparse_dim * _INDEX
    indices = _packed(rows[:, :split], torch.int64).t()
    values = _packed(rows[:, split:], like.dtype).reshape(len(rows), *like.shape[sparse_dim:])
    return sparse_sum(indices, values, like.shape, name)


def _packed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as `dtype`, copied since view() refuses some strides."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


class Rows(Encoding):
    """For gradients whose rows are gathered from all ranks and added up.

    Values are sent uncompressed. Dense gradients among sparse ones are made sparse.
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
        self._rows = no_rows(like, sparse_dim)

    def rows(self, _like: Tensor, _sparse_dim: int) -> Encoding:
        """Itself."""
        return self

    def encode(self, grad: Tensor) -> Tensor:
        """The gradient's rows, packed."""
        self._rows = pack(grad, self._dims)
        return self._rows

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor of no rows, since this rank sends nothing."""
        self._rows = no_rows(like_gradient(parameter), self._dims)
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
        total = unpack(receive(handle, self._rows), self._like, self._dims, self.call.name)
        return total if self._factor == 1.0 else total.mul_(self._factor)
