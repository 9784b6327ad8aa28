# SPDX-License-Identifier: Apache-2.0
"""How a Gradient is sent: unchanged, compressed, or made dense and contiguous. On autograd's
threads and the one that steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.arrays.buffers import NOWHERE
from farandole.calls.requests import Call, PreparedCall
from farandole.ops import Average, Sum
from farandole.torch.compression import Compression, Compressor
from farandole.torch.gradients.bucket_view import BucketView
from farandole.torch.kind import prepare
from farandole.torch.strides import like_gradient

EACH = 2 << 10  # bytes added per gradient, so that at most 32 are sent by one call


_Form = tuple[int, torch.dtype | None, int]
_NONE: _Form = 0, None, -1  # nothing is sent unchanged


class Encoding:
    """Converts a gradient to the tensor that is sent and back; submits that tensor to the core.

    In each round a Gradient calls encode(), or receive() where it has nothing, then submit(), and
    decode() at the end.
    """

    __slots__ = (
        *("_compressor", "_context", "_device", "_group", "_key", "_sparse_as_dense"),
        *("_prepared", "_sparse_dim", "call", "form", "grouped", "submit", "view", "weight"),
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
        self.grouped = group[0] is not None  # reduced with all members of the group or not at all
        self._context: Any = None
        self._sparse_dim: int | None = None
        self._prepared: PreparedCall | None = None
        self.view: BucketView | None = None  # where gradients are to be
        self._key: tuple[torch.dtype, torch.Size, torch.device] | None = None
        # The core's number of the tensor; dtype and elements of gradients that are sent unchanged.
        self.form = _NONE
        self._device: torch.device | None = None  # theirs
        # A gradient's share of the bytes that are sent by one call, if those of this form are
        # reduced in place on the CPU. 0: they are not, or it is not known yet.
        self.weight = 0
        # (input address, output address, what keeps them alive) -> handle
        self.submit: Callable[[int, int, object], int]

    def rows(self, like: Tensor, sparse_dim: int) -> Encoding:
        """The Rows to use from now on; closes the prepared call."""
        from farandole.torch.gradients.rows import Rows  # imported late: it uses this module

        if self._prepared is not None:
            self._prepared.close()
        return Rows(self.call, self._group, like, sparse_dim)

    def use_view(self, view: BucketView | None) -> None:
        """Sets the memory where gradients are to be."""
        self.view = view
        self.form, self.weight = _NONE, 0

    def carries(self, grad: Tensor) -> bool:
        """Whether `grad` has the same form and device as the last one, which was sent unchanged."""
        same = (grad.dtype, grad.numel()) == self.form[1:]
        return same and grad.device == self._device and grad.is_contiguous()

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
        # Strides do not show a lazy view of complex tensors, or of one element.
        own = self._compressor is Compression.none and encoded is grad
        plain = own and not grad.is_complex() and grad.numel() > 1
        self.form, self.weight = _NONE, 0
        if plain:
            on_cpu = prepared.current is None
            number = prepared.number if on_cpu else 0
            self.form, self._device = (number, grad.dtype, grad.numel()), grad.device
            if on_cpu and self.view is None:
                self.weight = encoded.nbytes + EACH
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
        """The result, decompressed, and sparse if the gradient was; may be called again."""
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
            view = self.view if self._compressor is Compression.none else None
            at = view.at if view and view.fits(encoded) else NOWHERE  # by its form: on all ranks
            prepared = prepare(self.call, encoded, self._group, in_place=True, place=at)
            self._prepared, self._key = prepared, key
            self.submit = prepared.submit
            self.form, self.weight = _NONE, 0
        return prepared
