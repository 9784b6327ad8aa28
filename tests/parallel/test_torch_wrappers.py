# SPDX-License-Identifier: Apache-2.0
"""Tensors without memory of their own: DTensor, MaskedTensor, what vmap makes, freed storage.

Every call refuses them on all ranks, whoever has them, and what comes after it works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import farandole as fd
import farandole.torch as hvd
from harness.wrapped_tensors import WRAPPED, Held, inside

pytestmark = [
    pytest.mark.ranks(2, 4),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # by forward_ad
]

CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: hvd.allreduce(x, name="call"),
    "allreduce, unnamed": lambda x: hvd.allreduce(x),
    "allreduce_": lambda x: hvd.allreduce_(x, name="call"),
    "allreduce, Adasum": lambda x: hvd.allreduce(x, name="call", op=hvd.Adasum),
    "allreduce, compressed": lambda x: hvd.allreduce(
        x, name="call", compression=hvd.Compression.bf16
    ),
    "allreduce_async": lambda x: hvd.allreduce_async(x, name="call").wait(),
    "grouped": lambda x: hvd.grouped_allreduce([torch.ones(2), x], name="call"),
    "grouped_": lambda x: hvd.grouped_allreduce_([torch.ones(2), x], name="call"),
    "allgather": lambda x: hvd.allgather(x, name="call"),
    "broadcast": lambda x: hvd.broadcast(x, 0, name="call"),
    "broadcast_": lambda x: hvd.broadcast_(x, 0, name="call"),
    "reducescatter": lambda x: hvd.reducescatter(x, name="call"),
    "alltoall": lambda x: hvd.alltoall(x, name="call"),
    "neutral": lambda x: fd.allreduce(x, name="call"),
    "neutral in place": lambda x: fd.allreduce_(x, name="call"),
}


def values() -> Tensor:
    """Rows for all ranks, unlike on each."""
    return torch.arange(4.0 * hvd.size()).view(-1, 2) + hvd.rank()


def works(call: str) -> None:
    """A plain tensor after that, twice: the second time takes the short way."""
    for _ in range(2):
        CALLS[call](values())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_every_call_refuses_them_everywhere(call: str, who: str) -> None:
    works(call)
    for name in ("DTensor", "MaskedTensor", "Wrapper"):
        wrap, remedy = WRAPPED[name]
        own = who == "all" or hvd.rank() == 0
        with pytest.raises(TypeError, match=f"{name} cannot be sent, .*{remedy}"):
            CALLS[call](wrap(values()) if own else values())
        works(call)


@pytest.mark.parametrize("call", ["allreduce_async", "allreduce_", "allgather", "neutral"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_inside_functional_transforms(call: str, transform: str) -> None:
    """Their class is Tensor, so the short way meets them."""
    works(call)
    refused = []

    def run(x: Tensor) -> None:
        with pytest.raises(TypeError, match="vmap, grad, functionalize"):
            CALLS[call](x)
        refused.append(x.shape)

    if hvd.rank() == 0:
        inside(transform, values(), run)
        assert refused == [values().shape]
    else:
        with pytest.raises(TypeError, match="vmap, grad, functionalize"):
            CALLS[call](values())
    works(call)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("left", [0, 1])
def test_freed_storage(call: str, left: int) -> None:
    """`left`: of its elements. The same tensor comes again, as in a loop."""
    x = values()
    for _ in range(2):
        CALLS[call](x)
    nbytes = x.untyped_storage().nbytes()
    if hvd.rank() == 0:
        x.untyped_storage().resize_(left * x.element_size())
    with pytest.raises(ValueError, match="storage of"):
        CALLS[call](x)
    if hvd.rank() == 0:
        x.untyped_storage().resize_(nbytes)
        x.copy_(values())
    CALLS[call](x)


def test_harmless_subclasses_go_on() -> None:
    class Named(Tensor):
        pass

    ranks = range(hvd.size())
    for wrap in (nn.Parameter, lambda x: x.as_subclass(Named), Held):
        x = wrap(torch.full((3,), 1.0 + hvd.rank()))
        for _ in range(3):
            result = hvd.allreduce_async(x, op=hvd.Sum, name="harmless").wait()
            assert type(result) is Tensor
            assert result.tolist() == [sum(1.0 + r for r in ranks)] * 3
        hvd.allreduce_(x, op=hvd.Sum, name="harmless in place")
        assert x.detach().as_subclass(Tensor).sum().item() == 3 * sum(1.0 + r for r in ranks)


# ---- parameters and states


@pytest.mark.parametrize("who", ["all", "rank 0", "last rank"])
def test_broadcast_parameters(who: str) -> None:
    for name in ("DTensor", "Wrapper"):
        wrap, _ = WRAPPED[name]
        own = who == "all" or hvd.rank() == (0 if who == "rank 0" else hvd.size() - 1)
        state = {"first": values(), "second": wrap(values()) if own else values()}
        with pytest.raises(TypeError, match=f"second.*{name} cannot be sent"):
            hvd.broadcast_parameters(state, root_rank=0)
        state["second"] = values()
        state["third"] = values()
        hvd.broadcast_parameters(state, root_rank=0)
        for x in state.values():
            assert torch.equal(x, torch.arange(4.0 * hvd.size()).view(-1, 2))


@pytest.mark.parametrize("who", ["all", "root"])
def test_broadcast_optimizer_state(who: str) -> None:
    p = nn.Parameter(values())
    p.grad = values()
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    optimizer.step()
    wrap, _ = WRAPPED["DTensor"]
    root = hvd.size() - 1
    if who == "all" or hvd.rank() == root:
        optimizer.state[p]["momentum_buffer"] = wrap(values())
    with pytest.raises(TypeError, match=r"momentum_buffer.*DTensor cannot be sent"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    optimizer.state[p]["momentum_buffer"] = values()
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert optimizer.state[p]["momentum_buffer"][0, 0].item() == root


@pytest.mark.parametrize("name", ["DTensor", "Wrapper"])
@pytest.mark.parametrize("view", [False, True])
def test_an_optimizer_of_such_parameters(name: str, view: bool) -> None:
    """As after FSDP's fully_shard(): said before anything is trained, naming the parameter."""
    wrap, remedy = WRAPPED[name]
    plain, wrapped = nn.Parameter(values()), wrap(values()).requires_grad_()
    with pytest.raises(TypeError, match=f"wrapped.*{name} cannot be sent, .*{remedy}"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([plain, wrapped], lr=0.1),
            named_parameters=[("plain", plain), ("wrapped", wrapped)],
            gradient_as_bucket_view=view,
        )
    hvd.barrier()


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse C.* tensor support is in beta")
def test_an_optimizer_of_a_sparse_parameter(layout: str) -> None:
    sparse = nn.Parameter(values().to_sparse(layout=getattr(torch, layout)))
    optimizer = torch.optim.SGD([nn.Parameter(values()), sparse], lr=0.1)
    with pytest.raises(TypeError, match=rf"group\[0\]\[1\] has layout torch.{layout}.*freeze"):
        hvd.DistributedOptimizer(optimizer)
    sparse.requires_grad_(False)
    hvd.DistributedOptimizer(optimizer)
    hvd.barrier()


@pytest.mark.parametrize("who", ["all", "rank 0"])
@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_gradient_of_such_a_class(who: str, compression: str, before: int) -> None:
    """It comes to a plain parameter, as from a hook; `before`: so many ordinary steps."""
    p = nn.Parameter(values() - hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=0.1),
        named_parameters=[("weight", p)],
        compression=getattr(hvd.Compression, compression),
    )
    for _ in range(before):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wrap, remedy = WRAPPED["Wrapper"]
    with pytest.raises(TypeError, match=f"weight.*Wrapper cannot be sent, .*{remedy}"):  # noqa: PT012
        p.grad = wrap(values()) if who == "all" or hvd.rank() == 0 else values()
        optimizer.step()
    p.grad = None
    hvd.barrier()


@pytest.mark.parametrize("call", CALLS)
def test_tensors_with_a_tangent_are_refused(call: str) -> None:
    """The call would drop the tangent, or, in place, keep the one of this rank."""
    works(call)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(values(), values() + 1.0)
        with pytest.raises(TypeError, match="its primal and its tangent"):
            CALLS[call](x)
        tangent = forward_ad.unpack_dual(x).tangent
        total = fd.allreduce(tangent, op=fd.Sum, name="tangent")
        assert torch.equal(total, sum(values() - hvd.rank() + r + 1 for r in range(hvd.size())))
    works(call)


def test_gradients_with_tangents_are_refused() -> None:
    """Autograd drops the tangent of a pass's first gradient, and keeps that of a sum."""
    p = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    for turn in range(3):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(3), torch.ones(3) + hvd.rank())
            with optimizer.no_sync():
                (p * x).sum().backward()
            with pytest.raises(TypeError, match=r"tangent.*leave dual_level"):
                (p * x).sum().backward()
        optimizer.zero_grad()
        (p * (1.0 + hvd.rank() + turn)).sum().backward()
        assert (p.grad == turn + (1 + hvd.size()) / 2).all()
        optimizer.zero_grad()


def test_gradients_without_tangents_are_reduced_within_dual_level() -> None:
    """The level may be another thread's: torch has one for the whole process."""
    p, q = (nn.Parameter(torch.ones(shape)) for shape in ((3,), (2, 3)))
    rows = nn.Embedding.from_pretrained(torch.ones(8, 2), freeze=False, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q, rows.weight], lr=1.0))
    entered, leave = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with forward_ad.dual_level():
            entered.set()
            leave.wait()

    other = threading.Thread(target=elsewhere)
    other.start()
    entered.wait()
    try:
        for turn in range(2):
            row = rows(torch.tensor([hvd.rank()])).sum()
            (p.sum() * (1.0 + hvd.rank() + turn) + q.t().sum() * hvd.rank() + row).backward()
            assert (rows.weight.grad.to_dense()[: hvd.size()] == 1.0 / hvd.size()).all()
            assert (p.grad == turn + (1 + hvd.size()) / 2).all()
            assert (q.grad == (hvd.size() - 1) / 2).all()
            optimizer.zero_grad()
    finally:
        leave.set()
        other.join()


def test_the_default_device_does_not_matter() -> None:
    """farandole's own tensors are on the CPU, whatever the program's default is."""
    with torch.device("meta"):
        x = torch.zeros(60, device="cpu").as_strided((2, 3, 4), (30, 5, 4)).fill_(hvd.rank())
        hvd.broadcast_parameters({"interleaved": x}, root_rank=1)
        assert (x == 1.0).all()
        sparse = torch.full((3,), 1.0 + hvd.rank(), device="cpu").to_sparse()
        total = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
        assert (total == sum(range(1, hvd.size() + 1))).all()
        assert hvd.empty(0).device.type == "cpu"
        p = nn.Parameter(torch.zeros(4, 3, device="cpu").t())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        if hvd.rank() == 0:
            p.sum().backward()
        else:
            optimizer.synchronize()
        assert (p.grad == 1.0 / hvd.size()).all()
