# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over all ranks' batches for torch, with one allreduce in the forward pass
(two in float64) and one in the backward pass, which runs on autograd's threads."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.calls.requests import Call, Op, refuse, world
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import Sum
from farandole.torch.mpi_ops import allreduce_

_UNNAMED = "layer"
# Number of layers that use each name; the key is ((world, process set), name).
_taken: Counter[tuple[tuple[int, int], str]] = Counter()
_taking = threading.Lock()


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """BatchNorm1d, 2d and 3d with the statistics of all ranks' batches together.

    Inputs are (N, C, ...); C is num_features. N may differ between ranks and may be 0. In eval
    mode, and in a process set of one rank, this is plain batch normalisation. But without running
    statistics, eval mode, too, is collective: it uses the batches of all ranks.

    `name` matches the layer across ranks and appears in errors; convert_sync_batchnorm uses the
    layer's path in the model. Some layers have no name, or share one (copies, two models of one
    class). These match by the order of their first use in training, which must be equal on all
    ranks; a layer that a rank builds but does not use does not count.

    Examples:
        >>> layer = hvd.SyncBatchNorm(3)
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 3])
    """

    _name = _UNNAMED  # old pickles lack this attribute
    _claim: tuple[tuple[int, int], str] | None = None  # ((world, process set), name of the calls)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        if name is not None:
            self._name = name

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"{self}, {self._name!r}: expected an input of at least 2 dimensions, got "
                f"{input.dim()}"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"{self}, {self._name!r}: expected {self.num_features} channels in dimension 1, "
                f"got an input of shape {tuple(input.shape)}"
            )
        if not input.is_floating_point():
            raise TypeError(f"{self}, {self._name!r}: expected floats, not {input.dtype}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises (N, C, ...); returns the same shape and dtype. Collective in training.

        Raises ValueError for fewer than 2 dimensions or other channels, and TypeError if the input
        is not floating point. In training, all ranks raise the error of one rank.
        """
        whole_batch = self.training or self.running_mean is None
        if not whole_batch or self.process_set.size() == 1:
            return super().forward(input)
        name = self._wire_name()
        try:
            self._check_input_dim(input)
        except (TypeError, ValueError) as reason:
            call = Call(Op.ALLREDUCE, f"{name}.forward", set_id(self.process_set))
            refuse(call, reason)
            raise
        normalise: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Normalise.apply
        y, mean, variance, count = normalise(
            input, self.weight, self.bias, self.eps, name, self.process_set
        )
        if self.training and self.running_mean is not None:
            self._track(mean, variance * (count / (count - 1).clamp(min=1)), count)
        return y

    def _wire_name(self) -> str:
        """The name of this layer's calls: the layer's name, with a number if other layers share it.

        A layer claims the name when it is first used in training, so a layer that only one rank
        builds claims none.
        """
        here = world(), set_id(self.process_set)
        if self._claim is None or self._claim[0] != here:
            with _taking:
                _taken[here, self._name] += 1
                number = _taken[here, self._name]
            only = number == 1 and self._name != _UNNAMED
            self._claim = here, f"sync_batch_norm.{self._name}{'' if only else f'#{number}'}"
        return self._claim[1]

    def __getstate__(self) -> dict[str, Any]:
        """Omits the claimed name, because copies and unpickled layers claim new ones."""
        return {key: value for key, value in self.__dict__.items() if key != "_claim"}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copies the layer; the copy shares its process set."""
        memo[id(self.process_set)] = self.process_set
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return made

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Updates the running statistics from these batches; `variance` is unbiased."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # as in torch, None means the mean over all batches
            share = 1.0 / float(self.num_batches_tracked)
        for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
            # If all ranks' batches are empty, `running` stays as it is.
            running.lerp_(torch.where(count > 0, batch.to(running.dtype), running), share)


def convert_sync_batchnorm(
    module: torch.nn.Module,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> torch.nn.Module:
    """Replaces every batch normalisation in `module`, and keeps parameters and buffers.

    Returns `module`, or a new module if `module` itself is replaced. Convert before you build the
    optimizer. A layer's name consists of `name` and the layer's path in `module`. `name` is by
    default the class of `module`: pass a name if ranks use two models of a class in different
    orders or threads. `process_set` holds the ranks whose batches count together. Raises ValueError
    for lazy layers that have not run yet.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> type(hvd.convert_sync_batchnorm(model)[1]).__name__
        'SyncBatchNorm'
    """
    return _converted(module, process_set, name or type(module).__name__, {})


def _converted(
    module: torch.nn.Module,
    process_set: ProcessSet,
    way: str,
    done: dict[torch.nn.Module, torch.nn.Module],
) -> torch.nn.Module:
    """`way`: the name of `module`. `done`: converted modules, because a module may occur twice."""
    if module not in done:
        done[module] = module
        if isinstance(module, SyncBatchNorm):
            if module._name == _UNNAMED and module._claim is None:
                module._name = way
        elif isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            done[module] = _layer_like(module, process_set, way)
        else:
            for key, child in list(module._modules.items()):
                if child is not None:
                    setattr(module, key, _converted(child, process_set, f"{way}.{key}", done))
    return done[module]


def _layer_like(
    plain: torch.nn.modules.batchnorm._BatchNorm, process_set: ProcessSet, name: str
) -> SyncBatchNorm:
    if isinstance(plain, torch.nn.modules.lazy.LazyModuleMixin):
        raise ValueError(f"{name} is a {type(plain).__name__}: run one batch through it first")
    layer = SyncBatchNorm(
        plain.num_features,
        plain.eps,
        plain.momentum,
        plain.affine,
        plain.track_running_stats,
        process_set,
        name,
    )
    layer._parameters.update(plain._parameters)
    layer._buffers.update(plain._buffers)
    return layer.train(plain.training)


class _Normalise(torch.autograd.Function):
    """Returns (y, mean, biased variance, count); the statistics cover all ranks, in float64."""

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
        own = mean.new_full((1,), count)  # filled by a kernel, so that the host does not wait
        call, centre = f"{name}.forward", torch.zeros_like(mean)
        if wide.dtype is torch.float64:  # next to a large mean, squares lose a small variance
            sums = torch.cat([mean * count, own])
            allreduce_(sums, None, call, Sum, process_set=process_set)
            call, centre = f"{name}.variance", sums[:-1] / sums[-1].clamp(min=1)
        mean -= centre
        sums = torch.cat([mean * count, spread + mean * mean * count, own])
        allreduce_(sums, None, call, Sum, process_set=process_set)
        total = sums[-1]
        divisor = total.clamp(min=1)
        mean = sums[:channels] / divisor
        variance = (sums[channels:-1] / divisor - mean * mean).clamp(min=0)
        mean += centre
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, divisor)
        ctx.name, ctx.process_set = name, process_set
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        y = wide * _along(scale, x) + _along(shift, x)
        ctx.mark_non_differentiable(mean, variance, total)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *_statistics: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, divisor = ctx.saved_tensors
        others = [d for d in range(x.dim()) if d != 1]
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        dy_wide, centred = dy.to(wide), x.to(wide) - _along(mean, x)
        sum_dy = dy_wide.sum(others).double()
        sum_dy_centred = (dy_wide * centred).sum(others).double()
        d_weight = None if weight is None else (sum_dy_centred * inverse).to(weight.dtype)
        d_bias = sum_dy.to(dy.dtype if weight is None else weight.dtype)
        sums = torch.cat([sum_dy, sum_dy_centred])
        allreduce_(sums, None, f"{ctx.name}.backward", Sum, process_set=ctx.process_set)
        mean_dy, mean_dy_centred = (sums / divisor).chunk(2)
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
    """Reshapes (C,) to (1, C, 1, ...), in the dtype in which the statistics of `x` are computed."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return channels.to(dtype).view(1, -1, *[1] * (x.dim() - 2))
