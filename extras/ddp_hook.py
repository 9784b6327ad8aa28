# SPDX-License-Identifier: Apache-2.0
"""A communication hook by which DistributedDataParallel reduces its buckets with farandole. Users
register it; DDP calls it on autograd's threads."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from farandole import Handle, ProcessSet, global_process_set
from farandole.extension import check
from farandole.torch import allreduce_async_

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

_numbers = count()


class DDPHookState:
    """What `ddp_comm_hook` knows of one model: who reduces, and the buckets under way."""

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        """All ranks make it, in the same order; `process_set`: those of DDP's process group."""
        check(process_set=process_set)
        self._process_set = process_set
        self._name = f"ddp.{next(_numbers)}"
        self._under_way: list[tuple[Handle[Tensor], torch.futures.Future[Tensor]]] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The future average of a bucket. The last one waits for all of its backward pass."""
        if bucket.index() == 0:
            self._under_way.clear()  # of a pass that has failed
        name = f"{self._name}.{bucket.index()}"
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        handle = allreduce_async_(bucket.buffer(), name=name, process_set=self._process_set)
        self._under_way.append((handle, future))
        if bucket.is_last():  # DDP waits for its futures in C++, where no signal is heard
            for begun, result in self._under_way:
                result.set_result(begun.wait())
            self._under_way.clear()
        return future


def ddp_comm_hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """For `DistributedDataParallel.register_comm_hook(hvd.DDPHookState(), hvd.ddp_comm_hook)`.

    DDP's buckets are averaged by farandole while the backward pass goes on; its process group does
    the rest. `state` is a DDPHookState, `bucket` DDP's own. backward() raises farandole's errors.

    Examples:
        >>> def reduced_by_farandole(model):  # a DistributedDataParallel
        ...     model.register_comm_hook(hvd.DDPHookState(), hvd.ddp_comm_hook)
    """
    if not isinstance(state, DDPHookState):
        raise TypeError(
            f"ddp_comm_hook's state is {state!r}: register it by "
            "model.register_comm_hook(hvd.DDPHookState(), hvd.ddp_comm_hook)"
        )
    return state.reduce(bucket)


if dist.is_available():  # DDP compares annotations with its own types, and takes no names of them
    ddp_comm_hook.__annotations__.update(
        {"return": torch.futures.Future[Tensor]},
        bucket=dist.GradBucket,  # type: ignore[attr-defined]
    )
