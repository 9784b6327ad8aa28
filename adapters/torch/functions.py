# SPDX-License-Identifier: Apache-2.0
"""Making ranks equal at the start: parameters, optimizer state, objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole import topology
from farandole.calls.arguments import shown
from farandole.calls.door import collective_then
from farandole.calls.requests import Op
from farandole.objects import allgather_object, broadcast_object
from farandole.parameters import PARAMETERS, agree_on_parameters, root_in, wait_for_all
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.exchange import broadcast_async_
from farandole.torch.kind import describe
from farandole.torch.state import Skeleton, apply, describe_tensors, skeleton_of

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

_STATE = "broadcast_optimizer_state"  # where ranks meet in it, unless a name is given


@collective_then(Op.ALLGATHER, unnamed=PARAMETERS)
def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
) -> Callable[[], None]:
    """Makes tensors equal to those of `root_rank`, in place; collective.

    `params`: model.state_dict(), model.named_parameters(), or a list of tensors; of any dtype,
    contiguous or not, with or without gradients. None among them is skipped. `name`: for calls from
    several threads. Raises on all ranks, whichever has them: ValueError for different names or
    roots, TypeError for what is no tensor, or one that cannot be sent.
    """
    root, pairs = root_in(root_rank, process_set), _pairs(params)
    for which, x in pairs:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"params holds {which!r} of type {type(x).__name__}, which is no tensor: send it "
                "by broadcast_object"
            )
        try:
            describe(x)
        except (TypeError, ValueError) as reason:
            raise type(reason)(f"params, {which!r}: {reason}") from reason

    def meet() -> None:
        names = [which for which, _ in pairs]
        agree_on_parameters(names, root, PARAMETERS if name is None else name, process_set)
        prefix = "parameter" if name is None else name
        _broadcast_tensors(dict(pairs), root, prefix, process_set)

    return meet


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        pairs = [(str(key), params[key]) for key in sorted(params, key=str)]
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        pairs = [
            (str(x[0]), x[1]) if isinstance(x, tuple) and len(x) == 2 else (str(i), x)
            for i, x in enumerate(params)
        ]
    else:
        raise ValueError(
            f"params is of type {type(params).__name__}: pass a dict or a list of tensors, such as "
            "model.state_dict()"
        )
    return [(name, x) for name, x in pairs if x is not None]


def _broadcast_tensors(
    tensors: Mapping[str, Tensor], root_rank: int, what: str, process_set: ProcessSet
) -> None:
    """In place; all at once, then waits."""
    under_way = []
    for name, tensor in tensors.items():
        whole = tensor.detach()
        whole = whole.resolve_conj().resolve_neg().contiguous()
        handle = broadcast_async_(whole, root_rank, f"{what}.{name}", process_set)
        under_way.append((handle, tensor, whole))
    wait_for_all([handle for handle, _, _ in under_way])
    with torch.no_grad():
        for _, tensor, whole in under_way:
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


@collective_then(Op.BROADCAST, "{}.length", unnamed=f"{_STATE}.length")
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
) -> Callable[[], None]:
    """Makes the optimizer's state and options equal to those of `root_rank`; collective.

    The state is built after the root's: other ranks may have none, or another, as when only the
    root has loaded a checkpoint. Nothing steps and no gradient is touched. Every optimizer of
    torch will do. `model` is accepted for Horovod's sake. `name`: for calls from several threads.
    Raises on all ranks TypeError for what is no optimizer on one, ValueError where the numbers of
    parameters differ.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise TypeError(
            f"optimizer is {shown(optimizer)}, of type {type(optimizer).__name__}: pass an "
            "optimizer of torch"
        )
    chosen = root_in(root_rank, process_set)
    root = topology.rank() == chosen
    tensors: list[Tensor] = []
    mine: Skeleton | None = skeleton_of(optimizer, tensors) if root else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    scope = _STATE if name is None else name

    def meet() -> None:
        skeleton: Skeleton = broadcast_object(mine, chosen, scope, process_set)
        counts: Sequence[list[int]] = allgather_object(own, f"{scope}.counts", process_set)
        if any(count != skeleton.counts for count in counts):
            raise ValueError(
                f"optimizers have different parameters: groups of {skeleton.counts} on rank "
                f"{chosen}, over the ranks {counts}; build them alike on all ranks"
            )
        received = tensors if root else describe_tensors(skeleton, optimizer)
        named = {str(i): tensor for i, tensor in enumerate(received)}
        prefix = "optimizer state" if name is None else name
        _broadcast_tensors(named, chosen, prefix, process_set)
        if not root:
            apply(skeleton, received, optimizer)

    return meet
