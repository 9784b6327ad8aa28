# SPDX-License-Identifier: Apache-2.0
"""shard_state=True: programs that go wrong, on one rank or on all, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from harness.sharded import (
    MAKES,
    Lamb,
    Lion,
    Make,
    same_on_all,
    sharded,
)
from harness.toys import batch, joined, loss_of, network, train, train_both

together = pytest.mark.ranks(2, 3, 4)


# ---- strangers


def test_three_epochs_with_evaluation_and_a_raise_between() -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model), MAKES["Adam"](reference.parameters())
    for epoch in range(3):
        train_both(model, optimizer, reference, alone, range(3 * epoch, 3 * epoch + 3))
        loss_of(model, batch(hvd.rank(), 99)).backward()  # then the batch is found to be bad
        with pytest.raises(ArithmeticError):
            raise ArithmeticError
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(
                loss_of(model, joined(50)), loss_of(reference, joined(50)), rtol=1e-9, atol=0
            )
        model.train()


@together
def test_clipping_differently_is_refused() -> None:
    model = network()
    optimizer = sharded(model, MAKES["SGD"])
    loss_of(model, batch(hvd.rank(), 0)).backward()
    with pytest.raises(hvd.MismatchError, match=r"rank 0 clips with max_norm 1\.0 .* rank 1 with"):
        optimizer.clip_grad_norm_(1.0 + hvd.rank())
    with pytest.raises((hvd.MismatchError, TypeError), match=r"None|'NoneType'"):
        optimizer.clip_grad_norm_(None if hvd.rank() == 1 else 1.0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


@together
def test_a_step_that_raises_on_one_rank_is_an_error_on_all() -> None:
    model = network()
    optimizer = sharded(model)

    def hook(*_: Any) -> None:
        if hvd.rank() == 1:
            raise ArithmeticError("this rank's disk is full")

    removable = optimizer.register_step_pre_hook(hook)
    loss_of(model, batch(hvd.rank(), 0)).backward()
    kind = ArithmeticError if hvd.rank() == 1 else Exception
    with pytest.raises(kind, match="disk is full"):
        optimizer.step()
    removable.remove()
    optimizer.zero_grad()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, range(2))
    same_on_all(model)


@together
def test_another_model_on_one_rank() -> None:
    model = nn.Linear(4, 3 + (hvd.rank() == 1))
    for _ in range(2):
        with pytest.raises(
            hvd.MismatchError, match=r"ranks 0 and 1 .* weight, .*\(3, 4\).*\(4, 4\)"
        ):
            sharded(model)
    train(network(), sharded(network()), range(1))


@together
def test_an_optimizer_that_is_refused_on_one_rank() -> None:
    model = network()
    with pytest.raises(ValueError, match="Lamb is not known to update each element by itself"):
        sharded(model, Lamb if hvd.rank() == hvd.size() - 1 else MAKES["Adam"])
    train(model, sharded(model), range(1))
    same_on_all(model)


@together
def test_other_learning_rates_on_one_rank() -> None:
    model = network()
    optimizer = sharded(model, lambda ps: torch.optim.SGD(ps, lr=0.1 * (1 + hvd.rank() % 2)))
    loss_of(model, batch(hvd.rank(), 0)).backward()
    with pytest.raises(hvd.MismatchError, match=r"ranks 0 and 1 .*lr: 0\.1.*lr: 0\.2"):
        optimizer.step()


@together
def test_a_rank_that_joins_is_an_error_on_the_others() -> None:
    model = network()
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    if hvd.rank() == 0:
        hvd.join()
        return
    with pytest.raises(hvd.MismatchError, match="rank 0 joined"):
        train(model, optimizer, range(1, 2))
    hvd.join()


@together
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_a_model_converted_later(when: str) -> None:
    model = network()
    optimizer = sharded(model)
    data = batch(hvd.rank(), 0)
    if when == "before backward":
        model.float()
        data = data[0].float(), data[1].float()

    def step() -> None:
        loss_of(model, data).backward()
        if when == "before step":
            model.float()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"0\.weight.*before DistributedOptimizer"):
        step()
    assert float(hvd.allreduce(torch.ones(()), op=hvd.Sum)) == hvd.size()


def test_parameters_moved_to_other_memory() -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model), MAKES["Adam"](reference.parameters())
    for step in range(4):
        train_both(model, optimizer, reference, alone, range(step, step + 1))
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def test_sparse_gradients_made_dense() -> None:
    table = nn.Embedding(11, 3, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), shard_state=True, sparse_as_dense=True
    )
    table(torch.tensor([hvd.rank(), 10])).sum().backward()
    optimizer.step()
    expected = torch.ones(11, 3)
    expected[10] -= 1
    expected[: hvd.size()] -= 1 / hvd.size()
    torch.testing.assert_close(table.weight.detach(), expected)


@together
def test_sparse_gradients_are_refused_on_all() -> None:
    table = nn.Embedding(11, 3, sparse=hvd.rank() == 1)
    plain = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, shard_state=True)
    with pytest.raises((TypeError, hvd.FarandoleError), match="sparse_as_dense=True"):
        table(torch.tensor([1])).sum().backward()
    assert not optimizer.state


@together
def test_skipping_a_reduction_that_was_not_made() -> None:
    model = network()
    optimizer = sharded(model)
    with optimizer.no_sync():
        loss_of(model, batch(hvd.rank(), 0)).backward()
    with (
        pytest.raises(ValueError, match=r"call synchronize\(\) before"),
        optimizer.skip_synchronize(),
    ):
        pass
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    same_on_all(model)


@together
def test_another_size_between_backward_and_step() -> None:
    p = nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), shard_state=True)
    (p * (1 + hvd.rank())).sum().backward()
    p.data = torch.zeros(6)
    with pytest.raises(RuntimeError, match=r"was torch.float32 \(4,\) .* is torch.float32 \(6,\)"):
        optimizer.step()


# ---- what is elementwise


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda ps: Lion(ps), "Lion is not known to update each element by itself"),
        (lambda ps: type("Own", (torch.optim.SGD,), {})(ps), "Own is not known"),
        (lambda ps: torch.optim.SparseAdam(ps), "SparseAdam is not known"),
        (lambda ps: torch.optim.LBFGS(ps), "LBFGS"),
    ],
    ids=["Lion", "SGD of a user", "SparseAdam", "LBFGS"],
)
def test_others_are_refused(make: Make, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sharded(network(), make)


def test_the_user_may_vouch() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(Lamb(model.parameters()), shard_state="elementwise")
    train(model, optimizer, range(2))
    same_on_all(model)
    with pytest.raises(ValueError, match="'elementwise'"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(network().parameters()),
            shard_state="yes",  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"op": hvd.Adasum}, "Adasum"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view"),
        ({"compression": type("Half", (), {"compress": None, "decompress": None})}, "compression"),
    ],
    ids=["Adasum", "views", "compression"],
)
def test_options_that_do_not_go_with_it(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*shard_state|shard_state.*{reason}"):
        sharded(network(), MAKES["SGD"], **options)


def test_parameters_that_share_memory() -> None:
    p = nn.Parameter(torch.ones(4))
    q = nn.Parameter(p.detach()[1:3])
    with pytest.raises(ValueError, match="share memory: make them one parameter"):
        hvd.DistributedOptimizer(torch.optim.SGD([p, q]), shard_state=True)
