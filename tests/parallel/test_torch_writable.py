# SPDX-License-Identifier: Apache-2.0
"""Destinations that nobody can write to: a typed error on all ranks, which names the tensor, before
anything has changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import farandole as fd
import farandole.numpy as fnp
import farandole.torch as hvd
from harness.ranks import last

pytestmark = pytest.mark.ranks(2, 3)

OVERLAPPING: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.full((1, 3), float(fd.rank())).expand(2, 3),
    "of one element": lambda: torch.tensor(float(fd.rank())).expand(4),
    "shifted": lambda: torch.arange(4.0).add(fd.rank()).as_strided((2, 3), (1, 1)),
    "shifted far": lambda: torch.arange(13.0).add(fd.rank()).as_strided((4, 2), (2, 6)),
}
STRIDED: dict[str, Callable[[], Tensor]] = {
    "with gaps": lambda: torch.full((4, 6), float(fd.rank()))[:, ::2],
    "interleaved": lambda: torch.full((8,), float(fd.rank())).as_strided((3, 2), (2, 3)),
    "turned": lambda: torch.full((3, 4), float(fd.rank())).t(),
    "a leaf": lambda: torch.full((3, 4), float(fd.rank()), requires_grad=True),
    "conjugated": lambda: torch.full((3,), 1j * fd.rank()).conj(),
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_buffer_whose_elements_share_memory(kind: str, everywhere: bool) -> None:
    model = nn.BatchNorm1d(3)
    own = OVERLAPPING[kind]()
    alike = torch.full_like(own, fd.rank(), memory_format=torch.contiguous_format)
    shared = everywhere or fd.rank() == last()
    model.register_buffer("place", own if shared else alike)
    with torch.no_grad():
        model.weight.fill_(fd.rank())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'place': elements of a .* share memory.*contiguous"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert fd.allgather_object(fd.rank()) == list(range(fd.size()))


@pytest.mark.parametrize("kind", [*OVERLAPPING, *STRIDED])
def test_what_the_root_sends_need_not_be_writable(kind: str) -> None:
    make = {**OVERLAPPING, **STRIDED}[kind]
    x = make() if kind in STRIDED or fd.rank() == 0 else make().contiguous()
    root = hvd.broadcast_object(x.tolist(), 0)
    hvd.broadcast_parameters({"x": x}, root_rank=0)
    assert x.tolist() == root


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_state_whose_elements_share_memory_at_the_root(kind: str) -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    mine = OVERLAPPING[kind]()
    if fd.rank() == 0:
        optimizer.state[p] = OrderedDict(buffer=mine, others=OrderedDict(a=1, b=[mine[:1]]))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state[p]
    assert type(state) is OrderedDict
    assert type(state["others"]) is OrderedDict
    assert state["buffer"].tolist() == hvd.broadcast_object(mine.tolist(), 0)
    if fd.rank() != 0:
        state["buffer"].add_(1)  # it is a tensor that an optimizer can update


CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce_": lambda x: hvd.allreduce_(x, name="x"),
    "broadcast_": lambda x: hvd.broadcast_(x, 0, name="x"),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([torch.ones(3), x], name="x"),
    "adasum": lambda x: hvd.allreduce_(x, op=hvd.Adasum, name="x"),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
@pytest.mark.parametrize("call", CALLS)
def test_calls_in_place(call: str, kind: str) -> None:
    x = OVERLAPPING[kind]()
    x = x if fd.rank() == last() else x.contiguous()
    before = x.clone()
    with pytest.raises(ValueError, match=r"'x.*elements of a tensor .* share memory.*contiguous"):
        CALLS[call](x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("call", ["allreduce_", "broadcast_", "grouped_allreduce_"])
def test_arrays_that_are_read_only(call: str) -> None:
    x = np.full(3, float(fd.rank()))
    x.flags.writeable = fd.rank() != last()
    with pytest.raises(ValueError, match=r"'x.*read-only"):
        CALLS[call](torch.ones(3) if call.startswith("grouped") and fd.rank() != last() else x)
    assert x.tolist() == [fd.rank()] * 3


def test_a_model_of_arrays_one_of_which_is_read_only() -> None:
    params = {"w": np.full(3, float(fd.rank())), "b": np.full(2, float(fd.rank()))}
    params["b"].flags.writeable = fd.rank() != last()
    with pytest.raises(ValueError, match=r"'b'.*read-only"):
        fnp.broadcast_parameters(params, 0)
    assert params["w"].tolist() == [fd.rank()] * 3


def test_a_receive() -> None:
    if fd.rank() > 1:
        return
    x = OVERLAPPING["expanded"]()
    with pytest.raises(ValueError, match=r"elements of a tensor .* share memory"):
        hvd.recv(x, 0) if fd.rank() else hvd.send(x, 1)
