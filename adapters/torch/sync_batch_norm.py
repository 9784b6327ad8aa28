# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all ranks: one reduction forward, one backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.ops import Sum
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.reductions import allreduce_

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

_numbers = itertools.count()  # layers are built in the same order on all ranks


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """BatchNorm1d, 2d and 3d whose statistics are those of the joined batch of all ranks.

    Inputs are (N, C, ...), N may differ between ranks and may be 0; C is num_features. In eval mode
    and on a rank of its own it is plain batch normalisation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        self._name = f"sync_batch_norm.{next(_numbers)}"

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions at least, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) to the same shape and dtype. Raises ValueError for fewer dimensions."""
        self._check_input_dim(input)
        whole_batch = self.training or self.running_mean is None
        if not whole_batch or self.process_set.size() == 1:
            return super().forward(input)
        normalise: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Normalise.apply
        y, mean, variance, count = normalise(
            input, self.weight, self.bias, self.eps, self._name, self.process_set
        )
        if self.training and self.running_mean is not None:
            self._track(mean, variance * (count / (count - 1).clamp(min=1)))
        return y

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics towards those of this batch; `variance` is unbiased."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the plain mean over all batches
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """As the function of the same name."""
        return convert_sync_batchnorm(module, process_set)


def convert_sync_batchnorm(
    module: torch.nn.Module, process_set: ProcessSet = global_process_set
) -> torch.nn.Module:
    """`module` with every batch normalisation in it replaced; parameters and buffers are kept.

    Convert before the optimizer is built. Returns a new module if `module` itself is replaced.
    """
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        if isinstance(module, SyncBatchNorm):
            return module
        layer = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_set,
        )
        layer._parameters.update(module._parameters)
        layer._buffers.update(module._buffers)
        return layer.train(module.training)
    for name, child in list(module.named_children()):
        setattr(module, name, convert_sync_batchnorm(child, process_set))
    return module


class _Normalise(torch.autograd.Function):
    """Gives (y, mean, biased variance, count): statistics of the joined batch, float64."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        others = [d for d in range(x.dim()) if d != 1]
        count = x.numel() // channels
        wide = x.double() if x.dtype is torch.float64 else x.float()
        mean = wide.mean(others).double() if count else wide.new_zeros(channels).double()
        spread = (wide - _along(mean, x)).square().sum(others).double()
        own = mean.new_full((1,), count)  # of a kernel: the host waits for nothing
        sums = torch.cat([mean * count, spread + mean * mean * count, own])
        allreduce_(sums, None, f"{name}.forward", Sum, process_set=process_set)
        total = sums[-1]
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean * mean).clamp(min=0)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.name, ctx.process_set = name, process_set
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        y = wide * _along(scale, x) + _along(shift, x)
        ctx.mark_non_differentiable(mean, variance, total)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *_statistics: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        others = [d for d in range(x.dim()) if d != 1]
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        dy_wide, centred = dy.to(wide), x.to(wide) - _along(mean, x)
        sum_dy = dy_wide.sum(others).double()
        sum_dy_centred = (dy_wide * centred).sum(others).double()
        d_weight = None if weight is None else (sum_dy_centred * inverse).to(weight.dtype)
        d_bias = sum_dy.to(dy.dtype if weight is None else weight.dtype)
        sums = torch.cat([sum_dy, sum_dy_centred])
        allreduce_(sums, None, f"{ctx.name}.backward", Sum, process_set=ctx.process_set)
        mean_dy, mean_dy_centred = (sums / total).chunk(2)
        scale = inverse if weight is None else inverse * weight
        slope = mean_dy_centred * inverse * inverse
        dx = (dy_wide - _along(mean_dy, x) - centred * _along(slope, x)) * _along(scale, x)
        needs = ctx.needs_input_grad
        return (
            dx.to(x.dtype),
            d_weight if needs[1] else None,
            d_bias if needs[2] else None,
            None,
            None,
            None,
        )


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """(C,) as (1, C, 1, ...) in the dtype of the arithmetic on `x`."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return channels.to(dtype).view(1, -1, *[1] * (x.dim() - 2))
