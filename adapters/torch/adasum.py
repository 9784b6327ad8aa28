# SPDX-License-Identifier: Apache-2.0
"""The optimizer's side of Adasum: ranks step on their own and combine how far they went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole import ops
from farandole.calls import requests
from farandole.ops import Adasum, Max
from farandole.process_sets import ProcessSet
from farandole.torch.compression import Compressor

__all__ = ["DeltaStep", "Deltas"]

_scopes: Counter[tuple[int, int | None]] = Counter()


class Deltas:
    """What parameters have moved by since `begin`, replaced in `finish` by all ranks' Adasum."""

    def __init__(
        self,
        process_set: ProcessSet,
        compressor_of: Callable[[str, Tensor], Compressor],
        names: Sequence[str],
    ) -> None:
        """`names` of the parameters, in the order of the groups."""
        self.process_set = process_set
        self._compressor_of = compressor_of
        self._names = list(names)
        self._generation = -1
        self._scope = ""
        self._starts: list[tuple[str, Tensor, Tensor]] = []

    @property
    def scope(self) -> str:
        """The optimizer's name on the wire; another one after shutdown() and init()."""
        if self._generation != requests.generation():
            self._generation = requests.generation()
            key = (self._generation, self.process_set.process_set_id)
            self._scope = f"adasum optimizer.{_scopes[key]}"
            _scopes[key] += 1
        return self._scope

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Remembers where the parameters are."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        later = range(len(self._names), len(parameters))  # of add_param_group
        names = [*self._names, *(f"parameter {i}" for i in later)]
        with torch.no_grad():
            self._starts = [
                (name, p, p.detach().clone())
                for name, p in zip(names, parameters, strict=True)
                if p.requires_grad
            ]

    @torch.no_grad()
    def finish(self) -> None:
        """Moves the parameters to their starts plus the Adasum of all ranks' ways; collective."""
        starts, self._starts = self._starts, []
        compressors = [self._compressor_of(name, p) for name, p, _ in starts]
        pairs = zip(compressors, starts, strict=True)
        wires = [c.compress((p.detach() - start).contiguous()) for c, (_, p, start) in pairs]
        combined = ops.grouped_allreduce(
            [wire for wire, _ in wires],
            op=Adasum,
            name=f"{self.scope}.deltas",
            process_set=self.process_set,
        )
        for delta, (_, context), compressor, (_, p, start) in zip(
            combined, wires, compressors, starts, strict=True
        ):
            p.copy_(start.add_(compressor.decompress(delta, context)))

    def any_overflow(self, found: Tensor) -> bool:
        """Whether a GradScaler has found infinities or NaN on any rank; collective."""
        flag = found.detach().to("cpu", torch.float32).reshape(1).contiguous()
        ops.allreduce_(flag, op=Max, name=f"{self.scope}.overflow", process_set=self.process_set)
        return bool(flag.item())


class DeltaStep(torch.optim.Optimizer):
    """Put before a distributed optimizer's class by op=Adasum."""

    _deltas: Deltas
    found_inf: Tensor | None
    grad_scale: Tensor | None

    def step(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The optimizer's own step on this rank's gradients, then the Adasum of all ranks' steps.

        Ranks whose parameters were equal before have equal parameters afterwards; the optimizer's
        state stays each rank's own. With a GradScaler all ranks skip the same steps; its scale is
        each rank's own too. Raises NotImplementedError with `timeout`: half a step is none.
        """
        if timeout is not None:
            raise NotImplementedError("op=Adasum takes no timeout: half a step can't be taken back")
        if self._overflowed():
            self._opt_called = True  # what torch's schedulers look at
            return None
        self._deltas.begin(self)
        result = super().step(*args, **kwargs)
        self._deltas.finish()
        return result

    # Already hooked and wrapped as far as torch is concerned: the inner step is.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _overflowed(self) -> bool:
        """Takes what GradScaler.step() has left here; undoes its scale where it has not."""
        found, scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
        if found is None:
            return False
        self.found_inf = self.grad_scale = None  # a fused inner step has nothing left to do
        if self._deltas.any_overflow(found):
            return True
        if scale is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad.device, p.grad.dtype))
        return False

    # GradScaler then always calls step(), whatever it has found on this rank alone.
    _step_supports_amp_scaling = True

    def skip_synchronize(self) -> NoReturn:
        """Raises NotImplementedError: with Adasum there is nothing before step() to skip."""
        raise NotImplementedError(
            "op=Adasum combines ranks in step() itself: clip or unscale gradients before it, and "
            "call step() without skip_synchronize()"
        )

    def set_weight(self, weight: float) -> NoReturn:
        """Raises NotImplementedError: Adasum is no average."""
        raise NotImplementedError("op=Adasum weighs ranks by themselves: it takes no set_weight()")
