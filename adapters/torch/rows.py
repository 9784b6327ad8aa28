# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients on the wire: one row of bytes for each element, its indices and its values."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from farandole.calls.requests import Call, Op, PreparedOnGpu, refuse
from farandole.ops import Average
from farandole.process_sets import size_of
from farandole.torch.kind import prepare, receive

__all__ = ["Rows", "no_rows", "pack", "unpack"]

_INDEX = torch.int64.itemsize


def no_rows(like: Tensor, sparse_dim: int) -> Tensor:
    """What a rank without elements of a tensor such as `like` sends: uint8, (0, bytes of a row)."""
    values = prod(like.shape[sparse_dim:]) * like.element_size()
    return torch.empty((0, sparse_dim * _INDEX + values), dtype=torch.uint8, device=like.device)


def pack(x: Tensor, sparse_dim: int) -> Tensor:
    """The rows of `x`, duplicates added up: uint8, (elements, bytes of a row). Dense `x` too."""
    rows = x.detach() if x.is_sparse else x.detach().to_sparse(sparse_dim)
    rows = rows.coalesce()
    count, width = rows.values().shape[0], prod(rows.values().shape[1:])
    values = rows.values().reshape(count, width)
    return torch.cat([_packed(rows.indices().t(), torch.uint8), _packed(values, torch.uint8)], 1)


def unpack(rows: Tensor, like: Tensor, sparse_dim: int) -> Tensor:
    """The coalesced sum of packed rows, of `like`'s dtype and shape."""
    split = sparse_dim * _INDEX
    indices = _packed(rows[:, :split], torch.int64).t()
    values = _packed(rows[:, split:], like.dtype).reshape(len(rows), *like.shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()


def _packed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as `dtype`. Copied: view() refuses strides that contiguous() leaves."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


class Rows:
    """As an Encoding, for gradients whose rows are gathered from all ranks and added up.

    Values travel uncompressed. Dense gradients among sparse ones are made sparse.
    """

    weight = number = 0  # as in Encoding

    def __init__(
        self, call: Call, group: tuple[str | None, int], like: Tensor, sparse_dim: int
    ) -> None:
        """`call` is that of the dense form; `like` has the gradients' shape and dtype."""
        self._call = replace(call, op=Op.ALLGATHER, name=f"{call.name}.rows", reduce_op=1)
        self._group = group
        self._like = like.detach()
        self._sparse_dim = sparse_dim
        self._factor = call.prescale * call.postscale
        if call.reduce_op == Average:
            self._factor /= size_of(call.process_set)
        self.stream = 0  # in which it was last submitted
        self.ensure(like)

    def refuse(self, reason: Exception) -> None:
        """As in Encoding."""
        refuse(self._call, reason)

    def ensure(self, parameter: Tensor) -> None:
        """Makes `submit` usable where nothing has been sent yet."""
        self._rows = no_rows(parameter, self._sparse_dim)

    def carries(self, _grad: Tensor) -> bool:
        """None goes as it is."""
        return False

    def encode(self, grad: Tensor) -> Tensor:
        """The contiguous tensor to send."""
        self._rows = pack(grad, self._sparse_dim)
        return self._rows

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor of the wire's form, where this rank sends nothing."""
        self.ensure(parameter)
        return self._rows

    def submit(self, input: int, _output: int, memory: object) -> int:
        """Gathers what encode() gave last; `input` 0: this rank sends nothing. Gives a handle."""
        tensor = prepare(self._call, self._rows, self._group, in_place=False)
        handle = tensor.submit(input, 0, memory)
        self.stream = tensor.stream if isinstance(tensor, PreparedOnGpu) else 0
        tensor.close()
        return handle

    def decode(self, _wire: Tensor, handle: int) -> Tensor:
        """The sum or average that a finished handle holds: sparse, coalesced."""
        total = unpack(receive(handle, self._rows), self._like, self._sparse_dim)
        return total if self._factor == 1.0 else total.mul_(self._factor)

    @property
    def grouped(self) -> bool:
        """Whether others wait for it: it is reduced with them or not at all."""
        return self._group[0] is not None
