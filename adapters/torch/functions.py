# SPDX-License-Identifier: Apache-2.0
"""broadcast_parameters and broadcast_optimizer_state, which give all ranks the same state.

They may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole import topology
from farandole.calls.arguments import shown
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.objects import allgather_object, broadcast_object
from farandole.parameters import PARAMETERS, agree_on_parameters, broadcast_all, root_in
from farandole.torch.kind import check, check_unused, device_and_stream, in_order, store
from farandole.torch.state import Skeleton, apply, describe_tensors, skeleton_of
from farandole.torch.strides import check_apart

Copied = tuple[Tensor, Tensor]  # a tensor, and the same tensor or a contiguous copy
_STATE = "broadcast_optimizer_state"  # default name of broadcast_optimizer_state's calls


@collective(Op.ALLGATHER, unnamed=PARAMETERS)
def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> None:
    """Makes tensors equal to those of `root_rank`, in place. This is a collective.

    Tensors may have any dtype and strides, and may require gradients. Values that are None are
    skipped. Calls from several threads need a `name`. An error on one rank is raised on all ranks,
    before any tensor changes. It is a ValueError if names or roots differ, or if elements of a
    tensor share memory, and a TypeError if a value is not a tensor or cannot be sent.

    - params: model.state_dict(), or a list of tensors or of (name, tensor) pairs.
    - root_rank: the sender's rank in the world; it must be in the process set.
    - process_set: the ranks that take part, by default all.
    - name: the prefix of the calls' names. If it is None, all such calls use the same prefix.
    - timeout: seconds until each wait raises StallError. None means no limit.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    root, pairs = root_in(root_rank, process_set), _pairs(params)
    sends = topology.rank() == root
    copies: dict[str, Copied] = {}
    for which, x in pairs:
        if which in copies:
            raise ValueError(f"params holds {which!r} twice: give each tensor its own name")
        if not isinstance(x, Tensor):
            raise TypeError(
                f"params holds {which!r} of type {type(x).__name__}, not a tensor: send it "
                "with broadcast_object"
            )
        try:
            check(x)
            device_and_stream(x.device)
            check_unused(x, writes=not sends)
            if not sends:
                check_apart(x)
            # Copies now, because another thread may use `x` later.
            copies[which] = x, in_order(x.detach())
        except (TypeError, ValueError) as reason:
            raise type(reason)(f"params, {which!r}: {reason}") from reason

    def meet() -> None:
        names = [which for which, _ in pairs]
        agree_on_parameters(names, root, PARAMETERS if name is None else name, process_set, timeout)
        prefix = "parameter" if name is None else name
        _broadcast(copies, root, prefix, process_set, timeout)

    return then(meet)


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


def _broadcast(
    copies: Mapping[str, Copied],
    root_rank: int,
    what: str,
    process_set: ProcessSet,
    timeout: float | None,
) -> None:
    """Broadcasts all tensors together, in place, and waits.

    Does not write to any tensor on the root rank.
    """
    named = [(f"{what}.{name}", whole) for name, (_, whole) in copies.items()]
    broadcast_all(named, root_rank, process_set, timeout)
    if topology.rank() != root_rank:
        for x, whole in copies.values():
            if x.data_ptr() != whole.data_ptr():
                store(whole, x)


@collective(Op.BROADCAST, "{}.length", unnamed=f"{_STATE}.length")
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> None:
    """Makes the optimizer's state and options equal to those of `root_rank`. This is a collective.

    On other ranks, state is replaced or created, so only the root needs to load a checkpoint. The
    call does not take a step and does not change any gradient. It supports all torch optimizers.
    Calls from several threads need a `name`. An error on one rank is raised on all ranks. It is a
    TypeError if an argument is not an optimizer, and a ValueError if the numbers of parameters
    differ.

    - optimizer: an optimizer of torch.optim, or of a class that derives from one.
    - root_rank: the sender's rank in the world; it must be in the process set.
    - model: accepted for compatibility with Horovod, and ignored.
    - process_set: the ranks that take part, by default all.
    - name: the prefix of the calls' names. If it is None, all such calls use the same prefix.
    - timeout: seconds until each wait raises StallError. None means no limit.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
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
    sent = [(x, in_order(x)) for x in tensors]  # copies now: another thread may use a tensor later
    own = [len(group["params"]) for group in optimizer.param_groups]
    scope = _STATE if name is None else name

    def meet() -> None:
        skeleton: Skeleton
        skeleton = broadcast_object(mine, chosen, scope, process_set, timeout=timeout)
        counts: Sequence[list[int]]
        counts = allgather_object(own, f"{scope}.counts", process_set, timeout=timeout)
        if any(count not in (None, skeleton.counts) for count in counts):  # None if it has joined
            raise ValueError(
                "optimizers have different parameters: the numbers of parameters in each group are "
                f"{skeleton.counts} on rank {chosen}; the lists of all ranks, in their order, are "
                f"{counts}. Build the same optimizer on all ranks"
            )
        received = [] if root else describe_tensors(skeleton, optimizer)
        copies = sent or [(x, in_order(x)) for x in received]
        prefix = "optimizer state" if name is None else name
        named = {str(i): pair for i, pair in enumerate(copies)}
        _broadcast(named, chosen, prefix, process_set, timeout)
        if not root:
            apply(skeleton, received, optimizer)

    return then(meet)
