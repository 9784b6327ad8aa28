# SPDX-License-Identifier: Apache-2.0
"""Calls that wait take a timeout: an error that names them, and then they go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from farandole.errors import StallError

CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": hvd.allreduce,
    "allgather": hvd.allgather,
    "broadcast": partial(hvd.broadcast, root_rank=0),
    "reducescatter": hvd.reducescatter,
    "alltoall": hvd.alltoall,
    "allgather_object": hvd.allgather_object,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_waits_takes_a_timeout(call: str) -> None:
    """The call stays under way: the rank that comes late completes it."""
    run = partial(CALLS[call], torch.full((2, 3), 1.0 + hvd.rank()), name=f"late {call}")
    if hvd.rank() == 0:
        with pytest.raises(StallError, match=f"late {call}"):
            run(timeout=0.05)
        hvd.send(torch.ones(1), 1)
    else:
        hvd.recv(torch.empty(1), 0)
        run()
    meet("go on")


def meet(name: str) -> None:
    hvd.allreduce(torch.ones(1), name=name)
