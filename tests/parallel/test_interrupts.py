# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every moment of a wait: the next wait gives the same result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from harness.interrupts import at_every_moment, interrupted

CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: fd.allreduce_async(x, op=fd.Sum),
    "in place": lambda x: fd.allreduce_async_(x, op=fd.Sum),
    "allgather": fd.allgather_async,
    "two": lambda x: fd.grouped_allgather_async([x, x]),
    "alltoall": fd.alltoall_async,
    "scatter": fd.scatter_async,
    "reducescatter": lambda x: fd.reducescatter_async(x, op=fd.Sum),
}


def _numbers(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_numbers(x) for x in result]
    return result.tolist()


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("call", CALLS)
def test_wait(call: str, make: Callable[[Any], Any]) -> None:
    known: list[Any] = []

    def attempt(moment: int) -> bool:
        rows = [[100.0 * fd.rank() + i] for i in range(2 * fd.size())]
        handle = CALLS[call](make(rows))
        was = interrupted(handle.wait, moment)
        numbers = _numbers(handle.wait())
        known[:] = known or [numbers]  # of a first attempt that nobody has interrupted
        assert numbers == known[0]
        return was

    assert not attempt(1000 * fd.size() + fd.rank())
    at_every_moment(attempt, least=2)
