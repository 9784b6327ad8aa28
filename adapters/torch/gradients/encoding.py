# SPDX-License-Identifier: Apache-2.0
"""How a Gradient is sent: unchanged, compressed, or made dense and contiguous. Each Gradient has
one, and uses it on autograd's threads and the one that steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.arrays.buffers import NOWHERE
from farandole.calls.handles import is_absent
from farandole.calls.requests import Call, PreparedOnGpu, PreparedTensor, refuse
from farandole.ops import Average, Sum
from farandole.torch.compression import Compression, Compressor
from farandole.torch.gradients.bucket_view import BucketView
from farandole.torch.gradients.rows import Rows
from farandole.torch.kind import prepare

_NONE = 0, None, -1  # a form: nothing is sent unchanged
EACH = 2 << 10  # bytes added per gradient, so that at most 32 are sent by one call


class Encoding:
    """Converts a gradient to the tensor that is sent and back; submits that tensor to the core."""

    __slots__ = (
        *("_call", "_compressor", "_context", "_device", "_group", "_key", "_sparse_as_dense"),
        *("_sparse_dim", "_tensor", "form", "submit", "view", "weight"),
    )
    missing = staticmethod(is_absent)  # of a finished handle: no rank had a gradient

    def __init__(
        self,
        call: Call,
        compressor: Compressor,
        sparse_as_dense: bool,
        group: tuple[str | None, int],
    ) -> None:
        """`group`: the group's name in calls and its number of members."""
        self._call = call
        self._compressor = compressor
        self._sparse_as_dense = sparse_as_dense
        self._group = group
        self._context: Any = None
        self._sparse_dim: int | None = None
        self._tensor: PreparedTensor | PreparedOnGpu | None = None
        self.view: BucketView | None = None  # where gradients are to be
        self._key: tuple[torch.dtype, torch.Size, torch.device] | None = None
        # The core's number of the tensor; dtype and elements of gradients that are sent unchanged.
        self.form: tuple[int, torch.dtype | None, int] = _NONE
        self._device: torch.device | None = None  # theirs
        # (input address, output address, what keeps them alive, `made` of lend()) -> handle
        self.submit: Callable[[int, int, object, list[int]], int]
        # A gradient's share of the bytes that are sent by one call, if those of this form are
        # reduced in place on the CPU. 0: they are not, or it is not known yet.
        self.weight = 0

    def rows(self, like: Tensor, sparse_dim: int) -> Rows:
        """The encoding to use instead, once a gradient was sparse on any rank."""
        if self._tensor is not None:
            self._tensor.close()
        return Rows(self._call, self._group, like, sparse_dim)

    def use_view(self, view: BucketView | None) -> None:
        """Sets the memory where gradients are to be."""
        self.view = view
        self.form, self.weight = _NONE, 0

    def carries(self, grad: Tensor) -> bool:
        """Whether it has the same form as the last one, which was sent unchanged."""
        same = (grad.dtype, grad.numel()) == self.form[1:]
        return same and grad.device == self._device and grad.is_contiguous()

    def encode(self, grad: Tensor) -> Tensor | None:
        """The contiguous tensor to send: `grad` itself if possible.

        None for a sparse one without sparse_as_dense: it needs another encoding, on all ranks.
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
        wire, self._context = self._compressor.compress(dense)
        wire = wire.resolve_conj().resolve_neg().contiguous()
        self._prepare(wire)
        # Strides do not show a lazy view of complex tensors, or of one element.
        own = self._compressor is Compression.none and wire is grad
        plain = own and not grad.is_complex() and grad.numel() > 1
        self.form, self.weight = _NONE, 0
        if plain:
            on_cpu = isinstance(self._tensor, PreparedTensor)
            number = self._tensor.number if on_cpu else 0  # type: ignore[union-attr]
            self.form, self._device = (number, grad.dtype, grad.numel()), grad.device
            if on_cpu and self.view is None:
                self.weight = wire.nbytes + EACH
        return wire

    def refuse(self, reason: Exception) -> None:
        """Tells the peers that this rank can't send its gradient, and why."""
        refuse(self._call, reason)

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor for the result, in the form that is sent, if this rank sends nothing."""
        if self._compressor is Compression.none:
            wire = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        else:
            wire, self._context = self._compressor.compress(torch.zeros_like(parameter))
            wire = wire.contiguous()
        self._prepare(wire)
        return wire

    def decode(self, wire: Tensor, _handle: int) -> Tensor:
        """The result in the gradient's form; may be `wire` itself."""
        if self._compressor is not Compression.none:
            wire = self._compressor.decompress(wire, self._context)
        return wire if self._sparse_dim is None else wire.to_sparse(self._sparse_dim)

    @property
    def stream(self) -> int:
        """The CUDA stream of the last submission; 0 on the CPU."""
        return self._tensor.stream if isinstance(self._tensor, PreparedOnGpu) else 0

    @property
    def grouped(self) -> bool:
        """Whether it is in a group: reduced with its other members or not at all."""
        return self._group[0] is not None

    def _check_rows(self) -> None:
        if self._call.reduce_op not in (Average, Sum):
            raise ValueError(
                f"{self._call.name}: a sparse gradient goes with Average and Sum only; give "
                "sparse_as_dense=True to DistributedOptimizer, or build the layer with sparse=False"
            )

    def _window_place_of(self, wire: Tensor) -> tuple[int, int]:
        """Its Buffer.place, decided by its form only, so that all ranks decide alike."""
        view = self.view
        if view is None or self._compressor is not Compression.none or not view.fits(wire):
            return NOWHERE
        return view.at

    def _prepare(self, wire: Tensor) -> None:
        key = (wire.dtype, wire.shape, wire.device)
        if key != self._key:
            if self._tensor is not None:
                self._tensor.close()
            at = self._window_place_of(wire)
            self._tensor = prepare(self._call, wire, self._group, in_place=True, place=at)
            self._key = key
            self.submit = self._tensor.submit
            self.form, self.weight = _NONE, 0
