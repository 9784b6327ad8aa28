# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(op=Adasum) for torch (Maleki et al., 2020): each rank steps by itself, then
the ranks combine their steps. Runs on the thread that calls step()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole.calls import part
from farandole.calls.requests import Call, Op, Scope, refuse
from farandole.members import set_id
from farandole.ops import Adasum
from farandole.torch.mpi_ops import grouped_allreduce
from farandole.torch.optimizer import ReducingOptimizer, combining


class AdasumOptimizer(ReducingOptimizer):
    """The class that DistributedOptimizer(op=Adasum) gives to an optimizer."""

    _compressor: Any
    _names: Sequence[str]  # names of the parameters at construction, in group order
    _scope: Scope
    _before_step: Callable[[], None]  # compares the ranks' models

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps on this rank's gradients, then applies the Adasum of all ranks' steps. Collective.

        Parameters that were equal on all ranks stay equal; each rank keeps its own optimizer state.
        With verify='raise', raises MismatchError if the ranks' parameters or settings differ.
        """
        scaled = [self.__dict__.pop(key, None) for key in ("found_inf", "grad_scale")]
        self._before_step()
        name = f"{self._scope.name}.deltas"
        if scaled[0] is not None:  # set by GradScaler.step(), perhaps on this rank alone
            reason = NotImplementedError(
                "op=Adasum does not work with a GradScaler, which skips steps rank by rank: train "
                "in bfloat16, which needs no GradScaler, or use op=Average"
            )
            refuse(Call(Op.ALLREDUCE, name, set_id(self._process_set)), reason)
            raise reason
        starts = self._values()
        result = super().step(*args, **kwargs)
        try:
            self._combine(name, starts)
        except BaseException as failure:  # this rank's parameters have changed already
            part.end(failure)
            raise
        return result

    # Tells torch not to wrap this step(), because the inner step is wrapped.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def named(self) -> list[tuple[str, Tensor]]:
        """Returns (name, parameter) for every parameter in the groups."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        later = range(len(self._names), len(parameters))  # added by add_param_group()
        names = [*self._names, *(f"parameter {i}" for i in later)]
        return list(zip(names, parameters, strict=False))  # parameters may have been removed

    @torch.no_grad()
    def _values(self) -> list[tuple[str, Tensor, Tensor]]:
        """Returns (name, parameter, copy of its values) for each parameter that is trained."""
        return [(name, p, p.detach().clone()) for name, p in self.named() if p.requires_grad]

    @torch.no_grad()
    def _combine(self, name: str, starts: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Sets parameters to their old values plus the Adasum of all ranks' changes. Collective."""
        form = self._compressor
        encoded = [form.compress((p.detach() - start).contiguous()) for _, p, start in starts]
        combined = grouped_allreduce(
            [x for x, _ in encoded],
            op=Adasum,
            name=name,
            process_set=self._process_set,
        )
        for delta, (_, context), (_, p, start) in zip(combined, encoded, starts, strict=True):
            p.copy_(start.add_(form.decompress(delta, context)))

    def _reduces(self) -> bool:
        return True

    # Makes GradScaler.step() call this optimizer's step() on every rank, so that all get its error.
    _step_supports_amp_scaling = True

    def skip_synchronize(self) -> NoReturn:
        """Raises NotImplementedError, because Adasum reduces nothing before step()."""
        raise NotImplementedError(
            "op=Adasum combines ranks in step() itself: clip or unscale gradients before it, and "
            "call step() without skip_synchronize()"
        )


combining[Adasum] = AdasumOptimizer
