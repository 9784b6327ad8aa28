# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of torch.distributed, each a message of farandole's between two ranks of a
group. Used by group.py, in any thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farandole.c10d import under_way
from farandole.c10d.calls import Tensors, one, room_of
from farandole.c10d.work import Futures, GroupWork
from farandole.messages import recv_async, send_async
from farandole.torch.strides import overlaps, write


class MessageWork(GroupWork):
    """A send or receive under way. Its future has its own thread, since messages have no place in
    the order of the group's collectives."""

    def __init__(self, handle: Any, tensor: Tensor) -> None:
        """`handle`: when it is done, the tensor was sent or has arrived."""
        super().__init__(handle, [tensor], Futures(), [tensor.device] if tensor.is_cuda else [])
        self._source = -1

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of a list of the tensor."""
        future = super().get_future()
        self._futures.close()
        return future

    def arrived(self, tensor: Tensor, room: Tensor, source: int) -> None:
        """Brings to `tensor` what has arrived in `room`."""
        self._source = source
        if room.data_ptr() != tensor.data_ptr():
            write([tensor], lambda: tensor.copy_(room))

    def source_rank(self) -> int:
        """Of a receive that has ended: who has sent, as a rank of the group."""
        return self._source

    _source_rank = source_rank


def send(tensors: Tensors, destination: int, **terms: Any) -> MessageWork:
    """Begins to send a tensor to that rank of the group; `terms`: further ones of send_async."""
    tensor = one(tensors)
    under_way.wait_for_users([tensor], ())
    work = MessageWork(send_async(tensor.detach(), destination, **terms), tensor)
    if tensor.is_contiguous():  # else a copy is sent
        under_way.add(work, [tensor], ())
    return work


def receive(tensors: Tensors, source: int | None, **terms: Any) -> MessageWork:
    """Begins to receive into a tensor from that rank of the group, None: from any."""
    tensor = one(tensors)
    room = tensor if overlaps(tensor) else room_of(tensor)  # recv_async() refuses it on both ranks
    under_way.wait_for_users((), [tensor])
    handle = recv_async(room, source, **terms)
    work = MessageWork(handle.map(lambda rank: work.arrived(tensor, room, rank)), tensor)
    under_way.add(work, (), [tensor])
    return work
