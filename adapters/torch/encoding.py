# SPDX-License-Identifier: Apache-2.0
"""How one parameter's gradient travels: as it is, compressed, or made dense and contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.arrays.buffers import NOWHERE
from farandole.calls.requests import Call, PreparedOnGpu, PreparedTensor, refuse
from farandole.ops import Average, Sum
from farandole.torch.bucket_view import Place
from farandole.torch.compression import Compression, Compressor
from farandole.torch.kind import prepare
from farandole.torch.rows import Rows

__all__ = ["Encoding"]


class Encoding:
    """Turns a gradient into the tensor on the wire and back; knows that tensor to the core."""

    __slots__ = (
        "_call",
        "_compressor",
        "_context",
        "_dtype",
        "_group",
        "_key",
        "_numel",
        "_sparse_as_dense",
        "_sparse_dim",
        "_tensor",
        "number",
        "place",
        "submit",
        "weight",
    )

    def __init__(
        self,
        call: Call,
        compressor: Compressor,
        sparse_as_dense: bool,
        group: tuple[str | None, int],
    ) -> None:
        """`group`: its name on the wire and its number of members."""
        self._call = call
        self._compressor = compressor
        self._sparse_as_dense = sparse_as_dense
        self._group = group
        self._context: Any = None
        self._sparse_dim: int | None = None
        self._tensor: PreparedTensor | PreparedOnGpu | None = None
        self.place: Place | None = None  # where gradients are to lie
        self._key: tuple[torch.dtype, torch.Size] | None = None
        self._dtype: torch.dtype | None = None  # of gradients that travel as they are
        self._numel = -1
        # (input address, output address, what keeps them alive) -> handle
        self.submit: Callable[[int, int, object], int]
        # The core's number of the tensor and the bytes of a gradient, where gradients in the form
        # of their parameter are reduced as they are and where they are, on the CPU. 0: they are
        # not, or it is not known yet.
        self.number = self.weight = 0

    def rows(self, like: Tensor, sparse_dim: int) -> Rows:
        """The encoding of gradients that turned out to be sparse, on any rank, in its stead."""
        if self._tensor is not None:
            self._tensor.close()
        return Rows(self._call, self._group, like, sparse_dim)

    def lie_at(self, place: Place | None) -> None:
        """Gradients are to lie there."""
        self.place = place
        self._carry_nothing()

    def carries(self, grad: Tensor) -> bool:
        """Whether it is such a gradient as the last one, which went as it was."""
        same = grad.dtype is self._dtype and grad.numel() == self._numel
        return same and grad.is_contiguous()

    def encode(self, grad: Tensor) -> Tensor | None:
        """The contiguous tensor to send: `grad` itself where nothing has to be done.

        None for a sparse one without sparse_as_dense: it needs another encoding, on all ranks.
        Raises ValueError where that has no meaning.
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
        # Of complex tensors and of one element strides do not tell that it is a lazy view.
        own = self._compressor is Compression.none and wire is grad
        plain = own and not grad.is_complex() and grad.numel() > 1
        self._dtype, self._numel = (grad.dtype, grad.numel()) if plain else (None, -1)
        on_cpu = isinstance(self._tensor, PreparedTensor)
        if plain and self.place is None and on_cpu:
            self.number, self.weight = self._tensor.number, wire.nbytes  # type: ignore[union-attr]
        return wire

    def refuse(self, reason: Exception) -> None:
        """Tells the peers that this rank can't send its gradient, and why."""
        refuse(self._call, reason)

    def ensure(self, parameter: Tensor) -> None:
        """Makes `submit` usable where nothing has been sent yet."""
        if self._tensor is None:
            self.receive(parameter)

    def receive(self, parameter: Tensor) -> Tensor:
        """A tensor of the wire's form for the result, where this rank sends nothing."""
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
        """The CUDA stream in which it was last submitted; 0 on the CPU."""
        return self._tensor.stream if isinstance(self._tensor, PreparedOnGpu) else 0

    @property
    def grouped(self) -> bool:
        """Whether others wait for it: it is reduced with them or not at all."""
        return self._group[0] is not None

    def _check_rows(self) -> None:
        if self._call.reduce_op not in (Average, Sum):
            raise ValueError(
                f"{self._call.name}: a sparse gradient goes with Average and Sum only; give "
                "sparse_as_dense=True to DistributedOptimizer, or build the layer with sparse=False"
            )

    def _place_of(self, wire: Tensor) -> tuple[int, int]:
        """Where it is reduced: by its form alone, as all ranks must decide this alike."""
        place = self.place
        if place is None or self._compressor is not Compression.none or not place.fits(wire):
            return NOWHERE
        return place.at

    def _prepare(self, wire: Tensor) -> None:
        key = (wire.dtype, wire.shape)
        if key != self._key:
            if self._tensor is not None:
                self._tensor.close()
            at = self._place_of(wire)
            self._tensor = prepare(self._call, wire, self._group, in_place=True, place=at)
            self._key = key
            self.submit = self._tensor.submit
            self._carry_nothing()

    def _carry_nothing(self) -> None:
        self._dtype, self._numel, self.number, self.weight = None, -1, 0, 0
