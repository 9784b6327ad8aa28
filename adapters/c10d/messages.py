# SPDX-License-Identifier: Apache-2.0
"""send() and receive() for torch.distributed, over farandole's messages.

group.py uses them from any thread.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from farandole.c10d import memory_in_use
from farandole.c10d.calls import Tensors, one, output_for
from farandole.c10d.work import GroupWork
from farandole.messages import recv_async, refuse_receive, send_async
from farandole.torch.kind import check_unused, store
from farandole.torch.strides import overlaps


class MessageWork(GroupWork):
    """A send or receive that is under way.

    Its future has its own thread, because the group's messages and collectives may end in any
    order.
    """

    def __init__(self, handle: Any, tensor: Tensor) -> None:
        """`handle` is done once the tensor has been sent or received."""
        super().__init__(handle, [tensor], None, [tensor.device] if tensor.is_cuda else [])
        self._source = -1

    def arrived(self, tensor: Tensor, buffer: Tensor, source: int) -> None:
        """Copies the message from `buffer` to `tensor`. `source` is the sender's rank."""
        self._source = source
        if buffer.data_ptr() != tensor.data_ptr():
            store(buffer, tensor)

    def source_rank(self) -> int:
        """Returns the sender's rank in the group once a receive has ended, else -1."""
        return self._source

    _source_rank = source_rank


def send(tensors: Tensors, destination: int, **terms: Any) -> MessageWork:
    """Starts to send a tensor to a rank of the group. `terms` are other arguments of send_async."""
    tensor = one(tensors)
    memory_in_use.wait_for_users([tensor], ())
    work = MessageWork(send_async(tensor.detach(), destination, **terms), tensor)
    if tensor.is_contiguous():  # otherwise the core sends a copy
        memory_in_use.add(work, [tensor], ())
    return work


def receive(tensors: Tensors, source: int | None, **terms: Any) -> MessageWork:
    """Starts to receive into a tensor. `source` is a rank of the group, or None for any rank."""
    tensor = one(tensors)
    # recv_async() rejects a tensor that overlaps itself, and reports the error on both ranks.
    buffer = tensor if overlaps(tensor) else output_for(tensor)
    memory_in_use.wait_for_users((), [tensor])
    if buffer is not tensor:
        try:
            check_unused(tensor, writes=True)
        except ValueError as reason:
            raise refuse_receive(reason, source, **terms) from None
    handle = recv_async(buffer, source, **terms)
    work = MessageWork(handle.map(lambda rank: work.arrived(tensor, buffer, rank)), tensor)
    memory_in_use.add(work, (), [tensor])
    return work
