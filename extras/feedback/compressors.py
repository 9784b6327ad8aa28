# SPDX-License-Identifier: Apache-2.0
"""The compressors with error feedback that come with farandole: TopK, PowerSGD, Int8 and OneBit.
For users, as members of Compression."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from farandole.extras.feedback.compressor import FeedbackCompressor, State, Steps


def _positive(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}: pass an int of at least 1")
    return value


class TopK(FeedbackCompressor):
    """Sends the elements of largest magnitude, with their indices, from each rank to all.

    Bytes grow with the number of ranks: each receives ranks * ratio * 8 bytes per element. (Strom,
    2015; Aji and Heafield, 2017; convergence: Stich et al., 2018.)

    Examples:
        >>> hvd.Compression.topk(0.01)
        TopK(ratio=0.01)
    """

    def __init__(self, ratio: float = 0.01) -> None:
        """`ratio`: the share of elements that are sent, above 0 and at most 1."""
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio!r}: pass a number above 0, at most 1")
        self.ratio = float(ratio)

    def reduce(self, tensor: Tensor, state: State, ranks: int, rank: int) -> Steps:
        """Gathers each rank's largest elements; returns their sum and this rank's."""
        flat = tensor.reshape(-1)
        count = max(1, round(flat.numel() * self.ratio))
        largest = flat.abs().topk(count, sorted=False).indices
        index = torch.int32 if flat.numel() < 2**31 else torch.int64
        values = flat[largest]
        parts = values.view(torch.uint8), largest.to(index).view(torch.uint8)
        everyones = yield self.allgather(torch.cat(parts))
        total = torch.zeros_like(flat)
        for row in everyones:  # in rank order, so that all ranks round alike
            theirs, places = row.tensor_split([values.nbytes])
            total.index_add_(0, _as(places, index).long(), _as(theirs, flat.dtype))
        sent = torch.zeros_like(flat).index_copy_(0, largest, values)
        return total.view_as(tensor), sent.view_as(tensor)

    def __repr__(self) -> str:
        return f"TopK(ratio={self.ratio})"


class PowerSGD(FeedbackCompressor):
    """Sends two low-rank factors of a gradient, seen as a matrix of shape[0] rows, by allreduce.

    Each training step does one step of subspace iteration, from the last step's factor. Takes
    parameters of two dimensions at least whose factors are at most half as large. (Vogels et al.,
    2019.)

    Examples:
        >>> hvd.Compression.powersgd(rank=2)
        PowerSGD(rank=2)
    """

    smallest = 1024

    def __init__(self, rank: int = 4) -> None:
        """`rank`: columns of the factors, 1 at least."""
        self.rank = _positive("rank", rank)

    def takes(self, parameter: Tensor) -> bool:
        """Whether the parameter is large enough, and its factors are at most half as large."""
        if parameter.dim() < 2 or parameter.numel() < self.smallest:
            return False
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return 2 * self.rank * (rows + columns) <= rows * columns

    def reduce(self, tensor: Tensor, state: State, ranks: int, rank: int) -> Steps:
        """Reduces two factors of the matrix; returns their product and this rank's part of it."""
        matrix = tensor.reshape(len(tensor), -1)
        columns, width = matrix.shape[1], self.rank
        last = state.get("factor")
        if last is None or last.shape != (columns, width) or last.dtype != matrix.dtype:
            generator = torch.Generator().manual_seed(columns)
            last = torch.randn(columns, width, generator=generator).to(matrix)
        left = yield self.allreduce(matrix @ last)
        left = _orthogonal(left)
        own = matrix.t() @ left
        right = yield self.allreduce(own)
        state["factor"] = right
        return _product(left, right).view_as(tensor), (left @ own.t()).view_as(tensor)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"


def _orthogonal(x: Tensor) -> Tensor:
    """Orthonormal columns that span those of `x` (modified Gram-Schmidt); zeros for dependent ones.

    Sums are taken in a fixed order by additions alone, so that all ranks get the same bits on any
    hardware and with any number of threads.
    """
    rest, columns = x, []
    tiny = torch.finfo(x.dtype).eps * _total(x * x).amax().sqrt()
    for _ in range(x.shape[1]):
        first, rest = rest[:, :1], rest[:, 1:]
        norm = _total(first * first).sqrt()
        first = torch.where(norm > tiny, first / norm, first * 0)
        columns.append(first)
        rest = rest - first * _total(first * rest)
    return torch.cat(columns, 1)


def _total(x: Tensor) -> Tensor:
    """The sum of rows, by folding: the order depends on their number alone."""
    while len(x) > 1:
        half = len(x) // 2
        odd = x[2 * half :]
        x = torch.cat([x[:half] + x[half : 2 * half], odd])
    return x


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T with the same bits on any hardware."""
    total = left[:, :1] * right[:, 0]
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[:, k]
    return total


class _Blocks(FeedbackCompressor):
    """Elements in few bits, with one scale for each block of elements.

    Each rank sums one part of the tensor: parts are sent to their owners encoded, added up, encoded
    again and gathered. So a rank sends 2 (n - 1) / n of the encoded bytes, as an allreduce does of
    the plain ones. The second encoding has its own residual, kept by the owner.
    """

    def __init__(self, block: int) -> None:
        self.block = _positive("block", block)

    @abstractmethod
    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks (n, block) as scales (n, 1) and bytes (n, bytes)."""

    @abstractmethod
    def _decode(self, scales: Tensor, encoded: Tensor) -> Tensor:
        """The blocks; each operation is exact or rounds alike on any hardware."""

    def reduce(self, tensor: Tensor, state: State, ranks: int, rank: int) -> Steps:
        """Sums each part on its owner, gathers the sums; returns the sum and this rank's part."""
        flat, count = tensor.reshape(-1), tensor.numel()
        width = -(-count // (ranks * self.block)) * self.block  # elements that one rank owns
        padded = torch.nn.functional.pad(flat, (0, ranks * width - count))
        encoded = self._packed(padded.view(ranks, width))
        received = yield self.alltoall(encoded)
        total = self._unpacked(received, flat.dtype).sum(0, keepdim=True)
        lost = state.get("second")
        if lost is not None and lost.shape == total.shape:
            total += lost
        total[:, max(0, count - rank * width) :] = 0  # padding
        own = self._packed(total)
        state["second"] = total - self._unpacked(own, flat.dtype)
        everyones = yield self.allgather(own[0])
        if len(everyones) < ranks:
            raise RuntimeError(
                "it needs all ranks in every step, and some have joined: use Compression.topk or "
                "powersgd, or equally many batches on all ranks"
            )
        result = self._unpacked(everyones, flat.dtype).reshape(-1)[:count]
        sent = self._unpacked(encoded, flat.dtype).reshape(-1)[:count]
        return result.view_as(tensor), sent.view_as(tensor)

    def _packed(self, rows: Tensor) -> Tensor:
        """Rows as bytes, the scales first: (rows, bytes)."""
        scales, encoded = self._encode(rows.reshape(-1, self.block))
        parts = scales.view(torch.uint8), encoded
        return torch.cat([part.reshape(len(rows), -1) for part in parts], 1)

    def _unpacked(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """What _packed() was given, less its error: (rows, elements)."""
        rows, width = packed.shape
        each = dtype.itemsize + self._bytes
        head = width // each * dtype.itemsize
        scales = _as(packed[:, :head], dtype).reshape(-1, 1)
        return self._decode(scales, packed[:, head:].reshape(-1, self._bytes)).view(rows, -1)

    @property
    @abstractmethod
    def _bytes(self) -> int:
        """Bytes of a block without its scale."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block={self.block})"


class Int8(_Blocks):
    """Sends elements as 8-bit integers, with one scale for each block: its largest magnitude.

    (Blocks: Dettmers et al., 2022. Error feedback at both ends: Tang et al., 2019, DoubleSqueeze.)

    Examples:
        >>> hvd.Compression.int8(block=256)
        Int8(block=256)
    """

    def __init__(self, block: int = 256) -> None:
        """`block`: elements that share a scale."""
        super().__init__(block)

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        scales = blocks.abs().amax(1, keepdim=True) / 127
        codes = torch.where(scales == 0, 0, blocks / scales).round_().clamp_(-127, 127)
        return scales, codes.to(torch.int8).view(torch.uint8)

    def _decode(self, scales: Tensor, encoded: Tensor) -> Tensor:
        return encoded.view(torch.int8).to(scales.dtype) * scales

    @property
    def _bytes(self) -> int:
        return self.block


class OneBit(_Blocks):
    """Sends the signs of elements, with one scale for each block: the mean of its magnitudes.

    (Seide et al., 2014, with a residual at both ends; the mean as the scale of signs with error
    feedback: Karimireddy et al., 2019.)

    Examples:
        >>> hvd.Compression.onebit(block=64)
        OneBit(block=64)
    """

    def __init__(self, block: int = 64) -> None:
        """`block`: elements that share a scale, a multiple of 8; larger ones lose more."""
        super().__init__(block)
        if block % 8:
            raise ValueError(f"block is {block}: pass a multiple of 8, since 8 signs make a byte")

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        signs = (blocks >= 0).view(torch.int64)  # 8 bytes of 0 or 1 each
        return blocks.abs().mean(1, keepdim=True), ((signs * _PACK) >> 56).to(torch.uint8)

    def _decode(self, scales: Tensor, encoded: Tensor) -> Tensor:
        signs = _SIGNS.to(scales).index_select(0, encoded.reshape(-1).int())
        return signs.view(-1, self.block) * scales

    @property
    def _bytes(self) -> int:
        return self.block // 8


# Times 8 bytes of 0 or 1: byte i becomes bit i of the highest byte.
_PACK = 0x0102040810204080
# By a byte: its bits as -1 and 1.
_SIGNS = (torch.arange(256)[:, None] >> torch.arange(8) & 1) * 2 - 1


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as a different dtype; copied, since view() refuses some offsets and strides."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)
