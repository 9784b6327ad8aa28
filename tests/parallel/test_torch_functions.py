# SPDX-License-Identifier: Apache-2.0
"""broadcast_parameters, broadcast_optimizer_state and objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from farandole.torch import functions

NAMES = """uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool complex64 complex128
uint16 uint32 uint64"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def same_everywhere(state: dict[str, Tensor]) -> None:
    """All ranks hold equal tensors. As lists: torch cannot unpickle its newer integer types."""
    plain = {name: (str(x.dtype), x.shape, x.tolist()) for name, x in state.items()}
    assert all(theirs == plain for theirs in hvd.allgather_object(plain))


# ---- parameters


@pytest.mark.parametrize("root", ["first", "last"])
def test_state_dict_with_buffers_of_any_dtype(root: str) -> None:
    root_rank = 0 if root == "first" else hvd.size() - 1
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    for dtype in DTYPES:
        values = torch.arange(5) * (1 + hvd.rank()) + hvd.rank()
        model.register_buffer(f"b_{dtype}".replace(".", "_"), values.to(dtype))
    model.register_buffer("scalar", torch.tensor(hvd.rank() + 0.5))
    model.register_buffer("empty", torch.zeros(0, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=root_rank)
    same_everywhere(model.state_dict())
    assert model.scalar.item() == root_rank + 0.5
    assert model.get_buffer("b_torch_int64").tolist() == [
        (1 + root_rank) * i + root_rank for i in range(5)
    ]


def test_lists_and_layouts() -> None:
    rank = float(hvd.rank())
    dense = torch.full((2, 3), rank)
    turned = torch.full((3, 4), rank).t()
    every_second = torch.full((8,), rank)[::2]
    leaf = torch.full((3,), rank, requires_grad=True)
    image = torch.full((1, 2, 3, 3), rank).to(memory_format=torch.channels_last)
    tensors = [dense, turned, every_second, leaf, image]
    hvd.broadcast_parameters(tensors, root_rank=hvd.size() - 1)
    for x in tensors:
        assert torch.equal(x, torch.full_like(x, hvd.size() - 1))
    named = [("b", dense), ("a", turned)]
    dense += rank
    hvd.broadcast_parameters(named, root_rank=0)
    assert torch.equal(dense, torch.full((2, 3), hvd.size() - 1.0))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("what", ["parameters", "a state"])
def test_values_are_taken_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Another thread of the root may start a call on the same memory meanwhile."""
    base = torch.arange(12.0).view(3, 4) * (1 + hvd.rank())
    x = base.t() if hvd.rank() == 0 else torch.zeros(4, 3)
    optimizer = torch.optim.SGD([torch.zeros(4, 3, requires_grad=True)], lr=1.0, momentum=0.9)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = x
    meeting = "agree_on_parameters" if what == "parameters" else "broadcast_object"
    meet, begun = getattr(functions, meeting), list[Any]()

    def change() -> Any:
        return hvd.allreduce_async_(base, op=hvd.Sum, name="meanwhile")

    def other_thread(*args: Any, **kwargs: Any) -> Any:
        if hvd.rank() == 0:
            begun.append(change())
        return meet(*args, **kwargs)

    monkeypatch.setattr(functions, meeting, other_thread)
    if what == "parameters":
        hvd.broadcast_parameters({"x": x}, root_rank=0)
    else:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        ((x,),) = (state.values() for state in optimizer.state.values())
    if hvd.rank() > 0:
        assert torch.equal(x, torch.arange(12.0).view(3, 4).t())
        begun.append(change())
    begun[0].wait()
    assert torch.equal(base, torch.arange(12.0).view(3, 4) * sum(range(1, hvd.size() + 1)))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_a_name_that_is_given_twice_is_an_error(who: str) -> None:
    twice = who == "all" or hvd.rank() == 0
    with pytest.raises(ValueError, match="params holds 'a' twice"):
        hvd.broadcast_parameters([("a", torch.ones(2)), ("a" if twice else "b", torch.ones(2))], 0)


@pytest.mark.ranks(2, 4)
def test_different_names_are_an_error_on_all_ranks() -> None:
    params = {"same": torch.zeros(1), f"own {hvd.rank() % 2}": torch.zeros(1)}
    odd, even = ("ranks 1, 3", "ranks 0, 2") if hvd.size() == 4 else ("rank 1", "rank 0")
    told = f"different parameters: missing on {odd}: 'own 0'; missing on {even}: 'own 1'$"
    with pytest.raises(ValueError, match=told):
        hvd.broadcast_parameters(params, root_rank=0)
    many = {f"layer.{i}": torch.zeros(1) for i in range(7 if hvd.rank() else 0)}
    told = r"missing on rank 0: 'layer.0', .*'layer.4' and 2 more$"
    with pytest.raises(ValueError, match=told):
        hvd.broadcast_parameters(many, root_rank=0)
    names = ["a", "b"] if hvd.rank() else ["b", "a"]
    with pytest.raises(ValueError, match="their order on ranks 0, 1 differs"):
        hvd.broadcast_parameters([(name, torch.zeros(1)) for name in names], root_rank=0)
    with pytest.raises(ValueError, match="root_rank is 0 on rank 0, 1 on rank 1"):
        hvd.broadcast_parameters({"a": torch.zeros(1)}, root_rank=min(hvd.rank(), 1))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


# ---- optimizer state

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
}


def parts(kind: str, groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 2)
    params: Any = model.parameters()
    if groups and kind != "lbfgs":
        params = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    return model, MAKERS[kind](params)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("who", ["root only", "others only", "all"])
def test_optimizer_state(kind: str, who: str) -> None:
    model, optimizer = parts(kind, groups=True)
    is_root = hvd.rank() == hvd.size() - 1
    if who == "all" or is_root == (who == "root only"):
        train(model, optimizer, steps=2 + hvd.rank())
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + hvd.rank())
    optimizer.zero_grad()
    params = [p.detach().clone() for p in model.parameters()]
    groups = list(optimizer.param_groups)
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    after = optimizer.state_dict()
    rooted = hvd.broadcast_object(after, root_rank=hvd.size() - 1)
    torch.testing.assert_close(after, rooted, rtol=0, atol=0)
    if is_root:
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    for p, was in zip(model.parameters(), params, strict=True):
        assert torch.equal(p, was)  # no fake step
        assert p.grad is None
    for group, was_group in zip(optimizer.param_groups, groups, strict=True):
        assert group is was_group  # schedulers hold on to them
    if hvd.size() > 1 and who == "others only" and kind != "adagrad":  # born with state
        assert not optimizer.state
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    train(model, optimizer, steps=1)
    same_everywhere(model.state_dict())


def test_dtypes_of_state_survive() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=torch.tensor(0.25 * (1 + hvd.rank())))
    if hvd.rank() == 0:
        optimizer.state[p] = {"master": torch.ones(2), "codes": torch.ones(2, dtype=torch.uint8)}
        optimizer.state["of all"] = {"samples": 7}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state[p]["master"].dtype is torch.float32  # load_state_dict would cast it
    assert optimizer.state[p]["codes"].tolist() == [1, 1]
    assert optimizer.state["of all"] == {"samples": 7}
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@pytest.mark.ranks(2, 4)
def test_different_optimizers_are_an_error_on_all_ranks() -> None:
    ps = [nn.Parameter(torch.zeros(1)) for _ in range(1 + hvd.rank() % 2)]
    with pytest.raises(ValueError, match=r"different parameters: .* are \[1\] on rank 0"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(ps, lr=0.1), root_rank=0)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@pytest.mark.ranks(3, 4)
def test_in_a_process_set() -> None:
    last = hvd.size() - 1
    ends = hvd.add_process_set([0, last])
    x = torch.full((3,), float(hvd.rank()))
    if ends.included():
        hvd.broadcast_parameters([x], root_rank=last, process_set=ends)
        p = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p], lr=0.5 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, root_rank=last, process_set=ends)
        assert optimizer.param_groups[0]["lr"] == 0.5 + last
        assert x.tolist() == [last] * 3
    else:
        assert x.tolist() == [hvd.rank()] * 3
    hvd.remove_process_set(ends)
