# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer updates each element by itself: found out by making steps with a copy of it
on small tensors, whole and divided. For DistributedOptimizer(shard_state=True)."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SHAPE = (6, 8)
_ELEMENTS = 48
_CUT = 17  # elements of the first of two parts
_STEPS = 4
_RATE = 0.1  # in place of the learning rate, which warm-up may have set to 0
_PARAMETER = object()  # the key of a tensor's own values beside those of its state
_STEP = "step"  # what a scheduler has put on the object


def why_not(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why its step on parts of parameters differs from that on the whole; None: equal.

    Copies of the optimizer, with the options of each of its groups, make a few steps on tensors of
    48 elements: one on all, two on a part each, as two ranks would. Parameters, states and random
    numbers of the user's are left as they are. An optimizer passes that is elementwise on these
    tensors and on no larger ones.
    """
    samples = list(_samples(optimizer))
    cuts = (slice(0, _ELEMENTS), slice(0, _CUT), slice(_CUT, _ELEMENTS))
    try:
        with _own_numbers():
            starts = [_numbers(number, p) for number, (_, p) in enumerate(samples)]
            twins = [_Twin(optimizer, samples, starts, cut) for cut in cuts]
            for step in range(_STEPS):
                for twin in twins:
                    twin.step(step)
    except Exception as reason:
        return f"on a small example its step() raises {type(reason).__name__}: {reason}"
    whole, *halves = twins
    for number, (group, _) in enumerate(samples):
        values = [half.values(number) for half in halves]
        for key, x in whole.values(number).items():
            parts = [own.get(key, x.new_empty(0)) for own in values]
            if x.shape == _SHAPE:
                x, parts = x.reshape(-1), [torch.cat([part.reshape(-1) for part in parts])]
            start = starts[number] if key == _PARAMETER else torch.zeros_like(x)
            if not all(_close(x, part, start) for part in parts):
                return (
                    f"on a small example of group {group}, steps on the whole and on its two parts "
                    f"give different values{'' if key == _PARAMETER else f' of its state {key!r}'}"
                )
    return None


def _samples(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    """(group, parameter), one of each dtype and device in each group."""
    for number, group in enumerate(optimizer.param_groups):
        seen = set()
        for p in group["params"]:
            if (p.dtype, p.device) not in seen and p.numel():
                seen.add((p.dtype, p.device))
                yield number, p


def _numbers(seed: int, like: Tensor, spread: float = 0.0) -> Tensor:
    """(48,) of normal numbers; with a `spread` they grow to 10**spread, from 10**-spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_ELEMENTS, generator=generator, dtype=torch.float64)
    x *= 10 ** torch.linspace(-spread, spread, _ELEMENTS, dtype=torch.float64)
    return x.to(like.device, like.dtype)


def _close(one: Tensor, other: Tensor, start: Tensor) -> bool:
    """Whether both have changed alike since `start`, to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    if one.is_complex():
        one, other, start = (torch.view_as_real(x) for x in (one, other, start))
    eps = torch.finfo(one.dtype).eps
    one, other, start = one.double(), other.double(), start.double()
    slack = 16 * eps * (start.abs() + one.abs()) + 64 * eps * (one - start).abs()
    same = (one - other).abs() <= slack
    return bool((same | (one == other) | (one.isnan() & other.isnan())).all())


class _Twin:
    """A copy of the optimizer on a part of the samples."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        samples: Sequence[tuple[int, Tensor]],
        starts: Sequence[Tensor],
        cut: slice,
    ) -> None:
        self._cut = cut
        whole = cut.stop - cut.start == _ELEMENTS
        shape = _SHAPE if whole else (cut.stop - cut.start,)
        self.tensors = [torch.nn.Parameter(x[cut].clone().reshape(shape)) for x in starts]
        memo: dict[int, Any] = {}
        for (group, p), tensor in zip(samples, self.tensors, strict=True):
            for other in optimizer.param_groups[group]["params"]:
                if (other.dtype, other.device) == (p.dtype, p.device):
                    memo[id(other)] = tensor
        self._optimizer = object.__new__(type(optimizer))
        for key, value in vars(optimizer).items():
            if key not in (_STEP, "state", "param_groups"):
                self._optimizer.__dict__[key] = (
                    OrderedDict() if _hooks(key) else _copied(value, memo)
                )
        state: defaultdict[Any, Any] = defaultdict(dict)
        groups = []
        for number, options in enumerate(optimizer.param_groups):
            mine = [
                (p, tensor)
                for (of, p), tensor in zip(samples, self.tensors, strict=True)
                if of == number
            ]
            groups.append({k: _copied(v, memo) for k, v in options.items() if k != "params"})
            groups[-1]["params"] = [tensor for _, tensor in mine]
            rate = options.get("lr")
            if isinstance(rate, Tensor):
                groups[-1]["lr"] = torch.full_like(rate, _RATE)
            elif rate is not None:
                groups[-1]["lr"] = _RATE
            for p, tensor in mine:
                if p in optimizer.state:
                    state[tensor] = {
                        k: self._sampled(v, p, tensor) for k, v in optimizer.state[p].items()
                    }
        self._optimizer.__dict__.update(state=state, param_groups=groups)

    def _sampled(self, value: Any, parameter: Tensor, tensor: Tensor) -> Any:
        """State for `tensor` from that of a parameter."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value.shape != parameter.shape or value.dim() == 0:
            return value.detach().clone()
        few = value.detach().reshape(-1)[:_ELEMENTS].repeat(-(-_ELEMENTS // max(1, value.numel())))
        return few[:_ELEMENTS][self._cut].reshape(tensor.shape).clone()

    def step(self, number: int) -> None:
        """One step, on gradients of which some are large and some small."""
        for i, tensor in enumerate(self.tensors):
            grad = _numbers(100 * (1 + number) + i, tensor, spread=2.0) * (1 + number)
            tensor.grad = grad[self._cut].reshape(tensor.shape).clone()
        self._optimizer.step()

    def values(self, number: int) -> dict[Any, Tensor]:
        """The values of one tensor, and the tensors in its state."""
        tensor = self.tensors[number]
        own = self._optimizer.state.get(tensor, {})
        state = {key: value for key, value in own.items() if isinstance(value, Tensor)}
        return {_PARAMETER: tensor.detach(), **state}


def _hooks(key: str) -> bool:
    return key.startswith("_optimizer_") and key.endswith("_hooks")


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy in which tensors of `memo` stand for parameters; itself if it can't be copied."""
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        return value


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Leaves torch's random numbers as they were."""
    cuda: Any = torch.cuda
    devices = list(range(cuda.device_count())) if cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield
