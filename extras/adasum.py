# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(op=Adasum): each rank makes its own step, and the steps are combined. On the
thread that steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole.calls.requests import Scope
from farandole.ops import Adasum
from farandole.torch.functions import largest_flag
from farandole.torch.mpi_ops import grouped_allreduce
from farandole.torch.optimizer import ReducingOptimizer, combining


class AdasumOptimizer(ReducingOptimizer):
    """What DistributedOptimizer(op=Adasum) makes of an optimizer."""

    _compressor: Any
    _names: Sequence[str]  # of the parameters that it was made with, in the order of the groups
    _scope: Scope
    _before_step: Callable[[], None]  # compares the ranks' models
    found_inf: Tensor | None
    grad_scale: Tensor | None
    _scaler: Any = None  # the GradScaler that calls step()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step on this rank's gradients, then the Adasum of all ranks' steps.

        Parameters that were equal on all ranks stay equal; the optimizer's state is local to each
        rank. With a GradScaler all ranks skip the same steps, and their scales stay equal. Raises
        MismatchError with verify='raise' if the ranks' parameters or settings differ.
        """
        self._before_step()
        if self._overflowed():
            self._opt_called = True  # torch's schedulers check it
            return None
        starts = self._values()
        result = super().step(*args, **kwargs)
        self._combine(starts)
        return result

    # Tells torch not to wrap this step: the inner step is already wrapped.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def named(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of all in its groups."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        later = range(len(self._names), len(parameters))  # of add_param_group
        names = [*self._names, *(f"parameter {i}" for i in later)]
        return list(zip(names, parameters, strict=False))  # some may have been taken out

    @torch.no_grad()
    def _values(self) -> list[tuple[str, Tensor, Tensor]]:
        """(name, parameter, a copy of its values)."""
        return [(name, p, p.detach().clone()) for name, p in self.named() if p.requires_grad]

    @torch.no_grad()
    def _combine(self, starts: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Sets parameters to their old values plus the Adasum of all ranks' changes; collective."""
        form = self._compressor
        encoded = [form.compress((p.detach() - start).contiguous()) for _, p, start in starts]
        combined = grouped_allreduce(
            [x for x, _ in encoded],
            op=Adasum,
            name=f"{self._scope.name}.deltas",
            process_set=self._process_set,
        )
        for delta, (_, context), (_, p, start) in zip(combined, encoded, starts, strict=True):
            p.copy_(start.add_(form.decompress(delta, context)))

    def _reduces(self) -> bool:
        return True

    def _overflowed(self) -> bool:
        """Reads GradScaler.step()'s attributes here; unscales the gradients if that is not done."""
        found, scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
        if found is None:
            return False
        self.found_inf = self.grad_scale = None  # so that a fused inner step does not unscale again
        found = torch.as_tensor(found)  # 0, a number, of a rank without gradients
        largest = largest_flag(found, f"{self._scope.name}.overflow", self._process_set)
        if self._scaler is not None:  # its update() changes the scale by this
            flags = {found.device: torch.tensor(largest, device=found.device)}
            self._scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = flags
        if largest:
            return True
        if scale is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad.device, p.grad.dtype))
        return False

    # With it GradScaler always calls step(), even if this rank alone found infinities.
    _step_supports_amp_scaling = True

    def skip_synchronize(self) -> NoReturn:
        """Raises NotImplementedError: with Adasum nothing is reduced before step()."""
        raise NotImplementedError(
            "op=Adasum combines ranks in step() itself: clip or unscale gradients before it, and "
            "call step() without skip_synchronize()"
        )


_GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_scaled_step = _GradScaler.step


@functools.wraps(_scaled_step)
def _step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """GradScaler.step(), which shows an optimizer its own flag, and not the scaler that has it."""
    if not isinstance(optimizer, AdasumOptimizer):
        return _scaled_step(self, optimizer, *args, **kwargs)
    optimizer._scaler = self
    try:
        return _scaled_step(self, optimizer, *args, **kwargs)
    finally:
        optimizer._scaler = None


_GradScaler.step = _step
combining[Adasum] = AdasumOptimizer
