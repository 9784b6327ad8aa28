# SPDX-License-Identifier: Apache-2.0
"""Calls on memory that an earlier call of this rank still uses: all ranks raise an error, because
results would depend on timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.numpy as fn
import farandole.torch as hvd
from farandole import adasum

pytestmark = pytest.mark.ranks(2, 3)

COUNT = 3000
Second = Callable[[Any], Any]
SECONDS: dict[str, tuple[Second, Second]] = {  # on the memory of the first call, and apart from it
    "the same": (lambda x: x, np.zeros_like),
    "a part": (lambda x: x[COUNT // 2 :], lambda x: np.zeros(COUNT - COUNT // 2)),
    "beyond the end": (lambda x: x.base[10 : COUNT + 10], np.zeros_like),
}


def last_to_come(first: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """All ranks make `first`, which is under way on all but the last one in `meanwhile`."""
    token, last = np.zeros(1), fd.size() - 1
    if fd.rank() < last:
        handle = first()
        meanwhile()
        fd.send(token, last)
        return handle.wait()
    for source in range(last):
        fd.recv(token, source)
    meanwhile()
    return first().wait()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("which", SECONDS)
def test_a_second_writer_is_refused_on_all_ranks(which: str, reads: bool) -> None:
    overlapping, apart = SECONDS[which]
    x = np.full(COUNT + 10, 1.0 + fd.rank())[:COUNT]

    def first() -> Any:
        call = fd.allreduce_async if reads else fd.allreduce_async_
        return call(x, op=fd.Sum, name="memory.first")

    def meanwhile() -> None:
        late = fd.rank() == fd.size() - 1
        text = "refused" if late else r"in use by 'memory\.first'.* wait for that call first"
        with pytest.raises(ValueError, match=text):
            fd.allreduce_((apart if late else overlapping)(x), name="memory.second")

    total = last_to_come(first, meanwhile)
    assert (total == sum(1.0 + rank for rank in range(fd.size()))).all()
    assert (x == (1.0 + fd.rank() if reads else total)).all()
    fd.allreduce_(overlapping(x), name="memory.second")  # after the first one's end


SIDE = 60
LAST = torch.tensor([[0, 1, 2]]), 1 + torch.arange(3.0)
ALONE = "a state"  # one rank copies, and a third one would wait for the last one
Reader = Callable[[torch.Tensor], Any]  # a call on the memory of a square matrix, by a copy of it
READERS: dict[str, Reader] = {
    "a transposed view": lambda m: hvd.allreduce(m.t(), name="memory.copied"),
    "the last row": lambda m: fd.allgather(m.numpy()[-1:], name="memory.copied"),  # not copied
    "columns": lambda m: hvd.allgather(m[:, 1:3], name="memory.copied"),
    "a negated view": lambda m: hvd.allreduce(torch._neg_view(m), name="memory.copied"),
    "one of a group": lambda m: hvd.grouped_allreduce([LAST[1], m.t()], name="memory.copied"),
    "compressed": lambda m: hvd.allreduce(
        m, name="memory.copied", compression=hvd.Compression.fp16
    ),
    "NumPy's, reversed": lambda m: fd.allreduce(m.numpy()[::-1, ::-1], name="memory.copied"),
    "sparse": lambda m: hvd.sparse_allreduce_async(
        torch.sparse_coo_tensor(LAST[0], m[0, :3], (9,), check_invariants=True),
        "memory.copied",
        hvd.Sum,
    )(),
    "parameters": lambda m: hvd.broadcast_parameters({"w": m.t()}, 0, name="memory.copied"),
    ALONE: lambda m: hvd.broadcast_optimizer_state(with_state(m.t()), fd.size() - 2),
    "a gradient": lambda m: step_by_hand(m.t()),
    "Adasum": lambda m: hvd.allreduce(m, op=hvd.Adasum, name="memory.copied"),
}


def with_state(x: torch.Tensor) -> torch.optim.Optimizer:
    parameter = torch.zeros(x.shape, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = x
    return optimizer


def step_by_hand(grad: torch.Tensor) -> None:
    parameter = torch.zeros(grad.shape, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    parameter.grad = grad
    optimizer.step()


MARKED = [pytest.param(w, marks=pytest.mark.ranks(2)) if w == ALONE else w for w in READERS]


@pytest.mark.parametrize("which", MARKED)
def test_memory_that_is_written_is_not_copied(which: str) -> None:
    """The copy would hold values from before the first call, or from after it, or both."""
    read = READERS[which]
    m = torch.arange(float(SIDE**2)).reshape(SIDE, SIDE) * (1 + fd.rank())
    expected = torch.arange(float(SIDE**2)).reshape(SIDE, SIDE) * sum(range(1, fd.size() + 1))

    def meanwhile() -> None:
        late = fd.rank() == fd.size() - 1
        with pytest.raises(ValueError, match=r"refused|memory is in use by 'memory"):
            read(m.clone() if late else m)

    total = last_to_come(lambda: hvd.allreduce_async_(m, op=fd.Sum, name="memory.first"), meanwhile)
    assert torch.equal(total, expected)
    read(m)  # after the first one's end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adasum_does_not_write_memory_that_a_call_reads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call was started between the ones that Adasum makes. All ranks raise."""
    x = torch.full((COUNT,), 1.0 + fd.rank()).to(dtype)
    find, begun = adasum._dot_products, list[Any]()

    def reads() -> Any:
        return fd.allreduce_async(x, op=fd.Sum, name="memory.reader")

    def meanwhile(*args: Any) -> Any:
        products = find(*args)
        if fd.rank() == 0:
            begun.append(reads())
        return products

    monkeypatch.setattr(adasum, "_dot_products", meanwhile)
    with pytest.raises(ValueError, match=r"refused|memory is in use by 'memory\.reader'"):
        fd.allreduce_(x, op=fd.Adasum, name="memory.adasum")
    total = (begun or [reads()])[0].wait()
    if fd.rank() == 0:
        assert (x == 1.0).all()
    assert torch.isfinite(total).all()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_that_ends_between_those_of_adasum(
    dtype: torch.dtype, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the tensor on one rank. In place all ranks raise; else the result is that of the
    values at the start."""
    x = torch.full((COUNT,), 1.0 + fd.rank()).to(dtype)
    expected = fd.allreduce(x, op=fd.Adasum, name="memory.expected")
    find, alone = adasum._dot_products, fd.add_process_set([0])

    def meanwhile(*args: Any) -> Any:
        products = find(*args)
        if fd.rank() == 0:
            fd.allreduce_(x, op=fd.Sum, prescale_factor=5.0, name="own", process_set=alone)
        return products

    monkeypatch.setattr(adasum, "_dot_products", meanwhile)
    if in_place:
        with pytest.raises(ValueError, match=r"a tensor was changed while its Adasum"):
            fd.allreduce_(x, op=fd.Adasum, name="memory.adasum")
    else:
        result = fd.allreduce(x, op=fd.Adasum, name="memory.adasum")
        assert torch.equal(result, expected)
    if fd.rank() == 0:
        assert (x == 5.0).all()
    monkeypatch.undo()
    fd.remove_process_set(alone)


def test_copies_of_other_elements_may_be_sent() -> None:
    """A row is written between the rows that are copied."""
    m = torch.full((7, COUNT), 1.0 + fd.rank())
    handles: list[Any] = []

    def first() -> Any:
        return hvd.allreduce_async_(m[3], op=fd.Sum, name="memory.row")

    def rows() -> None:
        for i, x in enumerate((m[::2], m.numpy()[-2::-4])):
            handles.append(fd.allreduce_async(x, op=fd.Sum, name=f"memory.rows.{i}"))

    def columns() -> None:
        late = fd.rank() == fd.size() - 1
        with pytest.raises(ValueError, match=r"refused|memory is in use"):
            hvd.allreduce(torch.zeros(2, 7) if late else m[:, -2:].t(), name="memory.columns")

    last_to_come(first, rows)
    assert all((handle.wait() == sum(range(1, fd.size() + 1))).all() for handle in handles)
    last_to_come(first, columns)


def test_several_calls_may_read_the_same_memory() -> None:
    x = np.full(COUNT, 1.0 + fd.rank())
    handles = [fd.allreduce_async(x[i:], op=fd.Sum, name=f"memory.read.{i}") for i in range(20)]
    for handle in handles:
        assert (handle.wait() == sum(1.0 + rank for rank in range(fd.size()))).all()


def test_a_refused_parameter_leaves_no_peer_waiting() -> None:
    params, last = {name: np.full(COUNT, float(fd.rank())) for name in "abcd"}, fd.size() - 1

    def early() -> Any:
        return fd.allreduce_async_(params["b"], name="memory.early")

    handle = early() if fd.rank() < last else None
    with pytest.raises(ValueError, match=r"parameter\.b"):
        fn.broadcast_parameters(params, last)
    (handle or early()).wait()
    assert all((params[name] == last).all() for name in "acd")


def test_ranks_may_tie_other_weights() -> None:
    a, b = (np.full(COUNT, float(fd.rank())) for _ in range(2))
    c = {0: a, 1: b}.get(fd.rank(), np.full(COUNT, float(fd.rank())))
    b = a if fd.rank() == 1 else b
    fn.broadcast_parameters({"a": a, "b": b, "c": c}, 0)
    assert all((x == 0.0).all() for x in (a, b, c))


def test_tied_weights_are_broadcast() -> None:
    weight = torch.full((40, 3), float(fd.rank()))
    flat = torch.arange(12.0) * (1 + fd.rank())
    state = {"embedding": weight, "head": weight, "flat": flat, "part": flat[4:8], "end": flat[6:]}
    hvd.broadcast_parameters(state, root_rank=1)
    assert (weight == 1.0).all()
    assert torch.equal(flat, torch.arange(12.0) * 2)
    array = np.full(9, float(fd.rank()))
    fn.broadcast_parameters({"one": array, "two": array[3:], "three": array[::-1].copy()}, 1)
    assert (array == 1.0).all()
