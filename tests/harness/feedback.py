# SPDX-License-Identifier: Apache-2.0
"""Gradients for tests of compressors with error feedback, and a plain model of each compressor that
sees all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import farandole.torch as hvd

__all__ = ["KINDS", "MODELS", "SHAPE", "gradient", "push", "same_everywhere", "sgd", "weight"]

Array = NDArray[Any]
SHAPE = 70, 93  # 6510 elements: whole blocks neither for a rank nor in all

KINDS: dict[str, Callable[[], hvd.FeedbackCompressor]] = {
    "topk": lambda: hvd.Compression.topk(0.03),
    "powersgd": lambda: hvd.Compression.powersgd(rank=3),
    "int8": lambda: hvd.Compression.int8(block=100),
    "onebit": lambda: hvd.Compression.onebit(block=200),
}


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Drawn by rank and step; of magnitudes that differ along the rows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return (values * torch.linspace(0.1, 3.0, SHAPE[1])).to(dtype)


def weight(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.zeros(SHAPE, dtype=dtype))


def sgd(*ps: nn.Parameter, kind: str = "topk", **options: Any) -> Any:
    options.setdefault("compression", KINDS[kind]())
    named = [(f"p{i}", p) for i, p in enumerate(ps)]
    return hvd.DistributedOptimizer(torch.optim.SGD(list(ps), lr=1.0), named, **options)


def push(p: Tensor, grad: Tensor) -> None:
    """A backward pass with this gradient."""
    push_each((p, grad))


def push_each(*pairs: tuple[Tensor, Tensor]) -> None:
    """One backward pass with a gradient for each parameter."""
    loss: Any = sum((p * grad).sum() for p, grad in pairs)
    loss.backward()


def same_everywhere(x: Tensor) -> None:
    everyones = hvd.allgather(x.detach().unsqueeze(0).contiguous())
    assert all(torch.equal(one, everyones[0]) for one in everyones)


# ---- the models: (gradients of all ranks) -> the sum, step by step


class TopKModel:
    def __init__(self, ranks: int) -> None:
        self.lost: list[Array] = [np.zeros(SHAPE) for _ in range(ranks)]

    def step(self, grads: list[Array]) -> Array:
        total = np.zeros(SHAPE)
        for r, grad in enumerate(grads):
            p = grad + self.lost[r]
            sent = np.zeros(p.size)
            largest = np.argsort(-abs(p.ravel()))[: round(0.03 * p.size)]
            sent[largest] = p.ravel()[largest]
            self.lost[r] = p - sent.reshape(SHAPE)
            total += sent.reshape(SHAPE)
        return total


class PowerModel:
    def __init__(self, ranks: int) -> None:
        self.lost: list[Array] = [np.zeros(SHAPE) for _ in range(ranks)]
        generator = torch.Generator().manual_seed(SHAPE[1])
        self.right = torch.randn(SHAPE[1], 3, generator=generator).double().numpy()

    def step(self, grads: list[Array]) -> Array:
        ps = [grad + lost for grad, lost in zip(grads, self.lost, strict=True)]
        left = np.linalg.qr(np.sum([p @ self.right for p in ps], 0))[0]
        onto = left @ left.T
        self.right = np.sum([p.T @ left for p in ps], 0)
        self.lost = [p - onto @ p for p in ps]
        return np.asarray(onto @ np.sum(ps, 0))


class BlockModel:
    def __init__(self, ranks: int, block: int, code: Callable[[Array], Array]) -> None:
        self.ranks, self.block, self.code = ranks, block, code
        self.lost: list[Array] = [np.zeros(SHAPE) for _ in range(ranks)]
        count = SHAPE[0] * SHAPE[1]
        self.width = -(-count // (ranks * block)) * block
        self.second: Array = np.zeros((ranks, self.width))

    def coded(self, rows: Array) -> Array:
        return np.concatenate([self.code(b) for b in rows.reshape(-1, self.block)])

    def step(self, grads: list[Array]) -> Array:
        total: Array = np.zeros(self.ranks * self.width)
        count = grads[0].size
        for r, grad in enumerate(grads):
            p: Array = np.zeros(total.size)
            p[:count] = (grad + self.lost[r]).ravel()
            sent = self.coded(p)
            self.lost[r] = (p - sent)[:count].reshape(SHAPE)
            total += sent
        total += self.second.ravel()
        total[count:] = 0
        result = self.coded(total)
        self.second = (total - result).reshape(self.second.shape)
        return result[:count].reshape(SHAPE)


def int8(block: Array) -> Array:
    scale = abs(block).max() / 127
    return block * 0 if scale == 0 else np.round(block / scale) * scale


def sign(block: Array) -> Array:
    return np.asarray(np.where(block >= 0, 1.0, -1.0) * abs(block).mean())


MODELS: dict[str, Callable[[int], Any]] = {
    "topk": TopKModel,
    "powersgd": PowerModel,
    "int8": lambda n: BlockModel(n, 100, int8),
    "onebit": lambda n: BlockModel(n, 200, sign),
}
