# SPDX-License-Identifier: Apache-2.0
"""FSDP2, DTensor, pipelining, ZeRO and the distributed checkpoint of torch, beside one process on
the joined batch. In ranks, by run.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH, STEPS = 8, 16, 4  # rows of a rank in a step


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def data(step: int) -> tuple[Tensor, Tensor]:
    """Rows and labels of all ranks."""
    torch.manual_seed(100 + step)
    return torch.randn(ROWS * size(), WIDTH), torch.randint(4, (ROWS * size(),))


def mine(whole: Tensor) -> Tensor:
    return whole.chunk(size())[rank()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, part: Callable[[Tensor], Tensor]
) -> None:
    for step in range(STEPS):
        x, y = data(step)
        F.cross_entropy(model(part(x)), part(y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone() -> nn.Module:
    model = network()
    train(model, sgd(model), lambda whole: whole)
    return model


def check_same(model: nn.Module, expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    found = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, p in found.items():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(whole.data, wanted[name].data, rtol=1e-4, atol=1e-5)


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(reshard: bool) -> None:
    model = sharded(network(), reshard_after_forward=reshard)
    train(model, sgd(model), mine)
    check_same(model, alone())


def test_hybrid_sharding() -> None:
    if size() < 4:
        pytest.skip("needs 4 ranks")
    mesh = init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, sgd(model), mine)
    check_same(model, alone())


@pytest.mark.parametrize("frozen", ["weights", "biases", "every other block", "first block"])
def test_fsdp2_several_forwards_of_parts_that_require_no_grad(frozen: str) -> None:
    """One module used twice before backward(), some of whose parameters are frozen; what is frozen
    changes between steps."""

    def freeze(model: nn.Sequential, step: int) -> None:
        for i, block in enumerate(model):
            for name, p in block.named_parameters():
                of = {
                    "weights": name.endswith("weight") and i != len(model) - 1,
                    "biases": name.endswith("bias"),
                    "every other block": i % 2 == step % 2,
                    "first block": i == 0,
                }
                p.requires_grad_(not of[frozen])

    def steps(model: nn.Sequential, part: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            freeze(model, step)
            x, y = data(step)
            first, second = model(part(x)), model(part(x).flip(1))
            loss = F.cross_entropy(first, part(y)) + F.cross_entropy(second, part(y))
            with torch.no_grad():
                model(part(x))  # a forward pass that needs no backward pass
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

    expected, model = network(), sharded(network())
    steps(expected, lambda whole: whole)
    steps(model, mine)
    check_same(model, expected)


def test_zero() -> None:
    model = DistributedDataParallel(network())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01), mine)
    check_same(model, alone())


def test_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 8 * size()), nn.GELU(), nn.Linear(8 * size(), 4))
    expected = copy.deepcopy(model)
    train(expected, sgd(expected), lambda whole: whole)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, sgd(model), lambda whole: whole)
    check_same(model, expected)


def test_dtensor_moves_between_placements() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    whole = torch.arange(6.0 * size() * size()).reshape(3 * size(), 2 * size())
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    by_columns = by_rows.redistribute(placements=[Shard(1)])
    torch.testing.assert_close(by_columns.to_local(), whole.chunk(size(), 1)[rank()])
    product = by_rows @ by_columns.redistribute(placements=[Replicate()]).T
    torch.testing.assert_close(product.full_tensor(), whole @ whole.T)
    torch.testing.assert_close(by_columns.sum().full_tensor(), whole.sum())


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipelining(schedule: Any) -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size())]
    for number, layer in enumerate(layers):
        torch.manual_seed(number)
        nn.init.normal_(layer[0].weight)
    torch.manual_seed(9)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    expected = nn.Sequential(*copy.deepcopy(layers))
    F.mse_loss(expected(x), y).backward()
    stage = PipelineStage(layers[rank()], rank(), size(), torch.device("cpu"))
    runner = schedule(stage, n_microbatches=4, loss_fn=F.mse_loss)
    first = (x,) if rank() == 0 else ()
    if rank() == size() - 1:
        losses: list[Tensor] = []
        runner.step(*first, target=y, losses=losses)
        torch.testing.assert_close(torch.stack(losses).mean(), F.mse_loss(expected(x), y))
    else:
        runner.step(*first)
    found, wanted = layers[rank()][0].weight.grad, expected[rank()][0].weight.grad
    torch.testing.assert_close(found, wanted)


def test_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    model = sharded(network())
    optimizer = sgd(model)
    train(model, optimizer, mine)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    other = sharded(network(seed=2))
    its_optimizer = sgd(other)
    weights, state = get_state_dict(other, its_optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    check_same(other, alone())
    train(model, optimizer, mine)
    train(other, its_optimizer, mine)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert isinstance(theirs, DTensor)
        torch.testing.assert_close(ours.to_local(), theirs.to_local())
