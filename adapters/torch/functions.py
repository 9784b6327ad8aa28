# SPDX-License-Identifier: Apache-2.0
"""Making ranks equal at the start: parameters, optimizer state, objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole import topology
from farandole.objects import allgather_object, broadcast_object
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.exchange import broadcast_async_
from farandole.torch.state import Skeleton, apply, describe_tensors, skeleton_of

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Makes tensors equal to those of `root_rank`, in place; collective.

    `params`: model.state_dict(), model.named_parameters(), or a list of tensors; of any dtype,
    contiguous or not, with or without gradients. None among them is skipped. Raises ValueError on
    all ranks where ranks have different names, and TypeError for what is no tensor.
    """
    pairs = _pairs(params)
    wrong = [name for name, x in pairs if not isinstance(x, Tensor)]
    names = [name for name, _ in pairs]
    told = allgather_object((names, wrong), process_set=process_set)
    for theirs, theirs_wrong in told:
        if theirs_wrong:
            raise TypeError(f"not tensors: {', '.join(theirs_wrong)}; use broadcast_object")
        if theirs != told[0][0]:
            different = sorted(set(theirs) ^ set(told[0][0])) or "their order"
            raise ValueError(f"ranks have different parameters: {different}")
    _broadcast_tensors(dict(pairs), root_rank, "parameter", process_set)


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        pairs = [(str(key), params[key]) for key in sorted(params, key=str)]
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        pairs = [
            (str(x[0]), x[1]) if isinstance(x, tuple) and len(x) == 2 else (str(i), x)
            for i, x in enumerate(params)
        ]
    else:
        raise ValueError(f"params is a dict or a list of tensors, not {type(params).__name__}")
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
    with torch.no_grad():
        for handle, tensor, whole in under_way:
            handle.wait()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Makes the optimizer's state and options equal to those of `root_rank`; collective.

    The state is built after the root's: other ranks may have none, or another, as when only the
    root has loaded a checkpoint. Nothing steps and no gradient is touched. Every optimizer of
    torch will do. `model` is accepted for Horovod's sake. Raises ValueError on all ranks where the
    numbers of parameters differ.
    """
    root = topology.rank() == root_rank
    tensors: list[Tensor] = []
    skeleton: Skeleton | None = skeleton_of(optimizer, tensors) if root else None
    skeleton = broadcast_object(skeleton, root_rank, process_set=process_set)
    assert skeleton is not None
    own = [len(group["params"]) for group in optimizer.param_groups]
    counts: Sequence[list[int]] = allgather_object(own, process_set=process_set)
    if any(count != skeleton.counts for count in counts):
        raise ValueError(
            f"optimizers have different parameters: groups of {skeleton.counts} on rank "
            f"{root_rank}, over the ranks {counts}"
        )
    if not root:
        tensors = describe_tensors(skeleton, optimizer)
    named = {str(i): tensor for i, tensor in enumerate(tensors)}
    _broadcast_tensors(named, root_rank, "optimizer state", process_set)
    if not root:
        apply(skeleton, tensors, optimizer)
