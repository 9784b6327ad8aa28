# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: ranks that train by themselves and meet every so many steps. Users make it; one thread at
a time steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from farandole import ProcessSet, allgather_object, global_process_set
from farandole.extension import Call, Op, Scope, check, heard_by_all, refuse_all, set_id
from farandole.extras.diloco.periods import (
    agree_on_making,
    agree_on_place,
    check_state,
    checked,
    checksum,
    difference_of,
    outer_step,
)
from farandole.torch import allgather_async, broadcast_parameters, grouped_allreduce_async_

_MEETING = "DiLoCo"  # name of the calls in which all ranks make one


class DiLoCo:
    """An outer optimizer: every `every` steps it combines what the ranks have learnt by themselves.

    Each rank trains with a plain optimizer, on its own data, without communication, and calls
    step() after each step of it. Every `every` steps the outer gradient, the last common parameters
    minus today's, is averaged over the ranks, and the outer optimizer steps with it from the common
    parameters. All ranks then have the same parameters, bit for bit. Without an outer optimizer
    they are the ranks' average: Local SGD (Stich, 2019). With torch.optim.SGD(params, lr=0.7,
    momentum=0.9, nesterov=True) it is DiLoCo (Douillard et al., 2023). The inner optimizer's state
    stays each rank's own, and so do buffers, as those of batch normalisation: before a test, call
    broadcast_parameters(model.state_dict(), 0) after an outer step.

    Making it is collective, and gives all ranks the parameters of the set's first rank: load
    weights before. Parameters that are frozen then are left out, and stay frozen. All ranks make
    equally many steps. After an error load a checkpoint, or make a new one.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        >>> diloco = hvd.DiLoCo(model.parameters(), outer, every=2)
        >>> for _ in range(2):
        ...     inner.zero_grad()
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     inner.step()
        ...     diloco.step()
        False
        True
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        outer_optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Collective over the process set; on ranks outside of it step() does nothing.

        Arguments:
            params: model.parameters(), or model.named_parameters(), whose names errors then have.
            outer_optimizer: an optimizer of torch.optim over the same parameters; only this object
                calls its step(). None: the ranks' parameters are averaged.
            every: steps from one outer step to the next.
            process_set: the ranks that meet.

        Raises on all ranks, if one has the error: ValueError and TypeError for wrong arguments,
        MismatchError where parameters or options differ between the ranks.
        """
        with heard_by_all(process_set, _MEETING):
            check(process_set=process_set, every=every)
            self._params, self._left_out = checked(params, outer_optimizer)
        self._outer = outer_optimizer
        self._every = int(every)
        self._process_set = process_set
        self._alone = not process_set.included()
        self._steps = self._rounds = 0
        self._scope = Scope(_MEETING, process_set)
        if not self._alone:
            self._meet()
        self._common = [p.detach().clone() for p in self._params.values()]

    def _meet(self) -> None:
        """Makes the parameters equal on all ranks. MismatchError if they have different ones."""
        own = {
            "every": str(self._every),
            "outer_optimizer": type(self._outer).__name__,
            **{name: f"{[*p.shape]} of {p.dtype}" for name, p in self._params.items()},
        }
        told = allgather_object(own, name=_MEETING, process_set=self._process_set)
        ranks = self._process_set.ranks or []
        agree_on_making(_MEETING, ranks, told)
        name = f"{_MEETING}.parameter"
        broadcast_parameters(self._params, ranks[0], self._process_set, name=name)
        _ = self._scope.name  # numbered in the order in which they are made

    def step(self) -> bool:
        """Counts a step of the inner optimizer; returns whether an outer step has followed.

        To be called after each of them. The outer step is collective. Raises on all ranks, before
        it changes a parameter: MismatchError if ranks have joined, or differ in the number of their
        steps or in the last common parameters; ValueError if a parameter is no longer frozen, or
        has a different dtype or device.
        """
        self._steps += 1
        if self._alone or self._steps % self._every:
            return False
        outer_step(self._params, self._common, self._outer_gradient(), self._outer)
        self._rounds += 1
        return True

    def _outer_gradient(self) -> list[Tensor]:
        """The average of all ranks'; collective."""
        number, scope = set_id(self._process_set), self._scope.name
        state, outer = f"{scope}.state", f"{scope}.outer gradient"
        try:
            if free := [name for name, p in self._left_out.items() if p.requires_grad]:
                raise ValueError(
                    f"{scope}: {free[0]} was frozen when the DiLoCo was made, and no longer "
                    "is: make a new DiLoCo when parameters start to train"
                )
            sums = [checksum(x) for x in self._common]
            words = [self._process_set.rank() or 0, self._steps, self._rounds, *sums]
            pairs = zip(self._params.items(), self._common, strict=True)
            grads = [difference_of(name, p, x) for (name, p), x in pairs]
        except Exception as reason:
            calls = [Call(Op.ALLGATHER, state, number), Call(Op.ALLREDUCE, outer, number)]
            refuse_all(calls, reason)
            raise
        told = allgather_async(torch.tensor([words]), state, self._process_set)
        reduced = grouped_allreduce_async_(grads, name=outer, process_set=self._process_set)
        try:
            rows = told.wait().tolist()
        finally:
            grads = reduced.wait()
        ranks, names = self._process_set.ranks or [], list(self._params)
        agree_on_place(scope, ranks, names, rows)
        return grads

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs in addition to the model and the inner optimizer.

        Tensors are this object's own, not copies.
        """
        return {
            "steps": self._steps,
            "rounds": self._rounds,
            "common": dict(zip(self._params, self._common, strict=True)),
            "outer": None if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state_dict(), in the middle of a period too; load the model as well.

        The state is copied, and goes to any number of ranks. Raises ValueError for one of other
        parameters, or with an outer optimizer where this has none.
        """
        check_state(state_dict, self._params, self._outer is not None)
        for own, name in zip(self._common, self._params, strict=True):
            own.copy_(state_dict["common"][name])
        self._steps, self._rounds = state_dict["steps"], state_dict["rounds"]
        if self._outer is not None:
            self._outer.load_state_dict(copy.deepcopy(state_dict["outer"]))  # torch keeps tensors
