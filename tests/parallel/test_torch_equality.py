# SPDX-License-Identifier: Apache-2.0
"""Ranks whose models or settings differ are told so, with names, ranks and the likely cause."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from farandole.observe import flight
from harness.in_flight import late
from harness.ranks import last, restarted
from harness.toys import batch, loss_of, network, train


@pytest.fixture(autouse=True)
def several() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank is equal to itself")


def made(model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    options = {"verify_every": 1, "verify": "raise", **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    train(model, optimizer, range(number, number + 1))


def add_rank(*ps: Tensor) -> None:
    for p in ps:
        p.data.add_(hvd.rank())


def flip(p: Tensor) -> None:
    p.data.view(torch.int32).view(-1)[3] ^= 1


DIFFERS = r"1 of \d+ parameters \(0\.weight\) differs, on rank"
NEVER = "were never equal: call broadcast_param"
# What differs after so many right steps, on all ranks or on the last one, and the next error.
FAULTS: dict[str, tuple[int, Any, str]] = {
    "no broadcast": (0, lambda ps, o: add_rank(ps[0]), f"after 0 steps: .*{DIFFERS}.*{NEVER}"),
    "a flipped bit": (
        2,
        lambda ps, o: late() and flip(ps[0]),
        rf"after 2 steps: .*: {DIFFERS} LAST against rank.*equal after 1 step:",
    ),
    "another learning rate": (
        2,
        lambda ps, o: late() and o.param_groups[0].update(lr=0.4),
        "after 2 steps: .*lr of group 0 is 0.1 on .*0.4 on rank LAST",
    ),
}


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, op: int) -> None:
    steps, does, text = FAULTS[fault]
    model = network()
    optimizer = made(model, op=op)
    for number in range(steps):
        step(model, optimizer, number)
    does([*model.parameters()], optimizer)
    with pytest.raises(hvd.MismatchError, match=text.replace("LAST", str(last()))):
        step(model, optimizer, steps)


def test_another_seed() -> None:
    """In an initialisation that drops weights; afterwards Dropout's masks differ by rank, which is
    no difference."""
    model = nn.Sequential(network(), nn.Dropout(0.3))
    torch.manual_seed(hvd.rank())
    with torch.no_grad():
        inner = model[0][2].weight
        inner.copy_(nn.functional.dropout(inner, 0.5))
    optimizer = made(model)
    text = r"after 0 steps: .*1 of 4 parameters \(0\.2\.weight\) differs, on rank.*broadcast_param"
    with pytest.raises(hvd.MismatchError, match=text):
        step(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for number in range(10):
        step(model, optimizer, number)
    hidden = hvd.allgather_object(nn.functional.dropout(torch.ones(64)).tolist())
    assert len(set(map(tuple, hidden))) == hvd.size()


def test_adasums_state_is_each_ranks_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = network(), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.inner(x) * self.scale
            return scaled

    model = Scaled()
    optimizer = made(model, op=hvd.Adasum)
    for number in range(4):
        step(model, optimizer, number)
    momentum = optimizer.state[model.scale]["momentum_buffer"].item()
    assert len(set(hvd.allgather_object(momentum))) == hvd.size()


def test_adasum_is_compared_every_so_many_steps() -> None:
    model = network()
    optimizer = made(model, verify_every=2 if hvd.rank() else 0, op=hvd.Adasum)
    step(model, optimizer)
    if hvd.rank() == last():
        optimizer.param_groups[0]["momentum"] = 0.25
    step(model, optimizer, 1)
    with pytest.raises(hvd.MismatchError, match=r"after 2 steps: momentum of group 0 is 0\.5 on"):
        step(model, optimizer, 2)


def test_a_frozen_layer_of_adasum_is_compared() -> None:
    model = network()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    optimizer = made(model, op=hvd.Adasum)
    step(model, optimizer)
    if hvd.rank() == last():
        frozen.data += 1
    with pytest.raises(hvd.MismatchError, match=r"1 of \d+ parameters \(0\.weight\) differs"):
        step(model, optimizer, 1)


def test_a_scheduler_that_steps_on_one_rank() -> None:
    model = network()
    optimizer = made(model, verify_every=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(2):
        step(model, optimizer, number)
        if hvd.rank() == last():
            scheduler.step()
    text = (
        rf"after 2 steps: .*; lr of group 0 is 0\.1 on ranks? .*, 0\.025 on rank {last()}\. "
        "They were equal after 0 steps: the different settings have changed them since"
    )
    with pytest.raises(hvd.MismatchError, match=text):
        step(model, optimizer, 2)


def test_a_layer_frozen_on_one_rank() -> None:
    model = network()
    if hvd.rank() == last():
        next(iter(model.parameters())).requires_grad_(False)
    optimizer = made(model)
    with pytest.raises(hvd.MismatchError, match="freeze"):
        step(model, optimizer)


def test_one_warning_is_enough() -> None:
    model = network()
    optimizer = made(model, 0.1 + hvd.rank(), verify="warn")
    with pytest.warns(UserWarning, match="lr of group 0"):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, 1)


def test_one_rank_that_raises_makes_all_raise() -> None:
    model = network()
    optimizer = made(model, 0.1 + hvd.rank(), verify="warn" if hvd.rank() else "raise")
    with pytest.raises(hvd.MismatchError, match="lr of group 0"):
        step(model, optimizer)


def test_intervals_may_differ() -> None:
    model = network()
    optimizer = made(model, verify_every=1 + hvd.rank())
    for number in range(5):
        step(model, optimizer, number)


def test_never() -> None:
    model = network()
    optimizer = made(model, 0.1 + hvd.rank(), verify_every=0)
    step(model, optimizer)


def test_the_default_warns_at_the_first_step() -> None:
    model = network()
    with torch.no_grad():
        next(model.parameters()).add_(hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(
        UserWarning, match=r"1 of \d+ parameters .* differs, on rank.*broadcast_param"
    ):
        step(model, optimizer)
    assert "have different models" in flight.own_page()["findings"]


@pytest.mark.parametrize(("setting", "argument"), [("0", None), ("1", 0)])
def test_off(setting: str, argument: int | None) -> None:
    with restarted(FARANDOLE_VERIFY_EVERY=setting):
        model = network()
        step(model, made(model, 0.1 + hvd.rank(), verify_every=argument))


@restarted(FARANDOLE_VERIFY_EVERY="2")
def test_the_setting_is_the_interval() -> None:
    model = network()
    optimizer = made(model, verify_every=None)
    step(model, optimizer)
    if hvd.rank() == last():
        optimizer.param_groups[0]["lr"] = 0.4
    step(model, optimizer, 1)
    with pytest.raises(hvd.MismatchError, match=r"after 2 steps: .*lr of group 0 is 0.1 on"):
        step(model, optimizer, 2)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_state_that_nobody_broadcast(kind: str) -> None:
    """Rank 0 alone has loaded a checkpoint, and the model only was broadcast after it."""
    model = network()
    kinds: Any = {
        "Adam": lambda: torch.optim.Adam(model.parameters()),
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    older = kinds[kind]()
    loss_of(model, batch(0, 0)).backward()
    older.step()
    inner = kinds[kind]()
    if hvd.rank() == 0:
        inner.load_state_dict(older.state_dict())
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), verify_every=1, verify="raise"
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    held = {"Adam": "exp_avg, exp_avg_sq, step 1.0", "SGD": "momentum_buffer"}[kind]
    text = f"after 0 steps: state of 0.weight is {held} on rank 0, none on rank.*broadcast_optim"
    with pytest.raises(hvd.MismatchError, match=text):
        step(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer, 0)
    step(model, optimizer)
    step(model, optimizer)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.filterwarnings("ignore:Sparse C.* tensor support is in beta")
def test_sparse_parameters(layout: str) -> None:
    model = network()
    optimizer = made(model)
    convert = {
        "coo": Tensor.to_sparse_coo,
        "csr": Tensor.to_sparse_csr,
        "csc": Tensor.to_sparse_csc,
    }
    sparse = nn.Parameter(convert[layout](torch.eye(3)), requires_grad=False)
    optimizer.add_param_group({"params": [sparse]})
    step(model, optimizer)
    step(model, optimizer, 1)
    if hvd.rank() == last():
        held = sparse.detach()
        (held._values() if layout == "coo" else held.values())[1] = 2
    with pytest.raises(hvd.MismatchError, match=r"1 of \d+ parameters \(group\[1\]\[0\]\) differs"):
        step(model, optimizer, 2)


def test_frozen_parameters_in_another_layout() -> None:
    model = network()
    optimizer = made(model)
    frozen = nn.Parameter(torch.arange(6.0).reshape(2, 3).t(), requires_grad=False)
    odd = nn.Parameter(torch.ones(3, dtype=torch.complex64).conj(), requires_grad=False)
    optimizer.add_param_group({"params": [frozen, odd]})
    step(model, optimizer)
    if hvd.rank() == last():
        frozen.data = frozen.data.contiguous()  # another layout of the same values
    step(model, optimizer, 1)
    if hvd.rank() == last():
        odd.data = odd.data * 2
    with pytest.raises(hvd.MismatchError, match=r"1 of \d+ parameters \(group\[1\]\[1\]\) differs"):
        step(model, optimizer, 2)


def test_accumulation_and_a_skipped_step_are_no_difference() -> None:
    model = network()
    optimizer = made(model, backward_passes_per_step=2)
    for number in range(6):
        loss_of(model, batch(hvd.rank(), number)).backward()
        if number in (1, 5):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2, 3)
def test_a_long_training_is_no_difference() -> None:
    """BatchNorm's statistics and Dropout's masks differ by rank, an average of weights is kept, an
    embedding's gradients are sparse, and passes are in bfloat16: equal after each of 150 steps."""
    torch.manual_seed(3)
    table = nn.Embedding(17, 6, sparse=True)
    middle = nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
    net = nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 1))
    average = torch.optim.swa_utils.AveragedModel(net)
    torch.manual_seed(hvd.rank())
    rows = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    dense = torch.optim.AdamW(net.parameters(), lr=0.01)
    options: Any = {"verify_every": 1, "verify": "raise"}
    optimizers = [hvd.DistributedOptimizer(inner, **options) for inner in (rows, dense)]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(dense, 50)
    for _ in range(150):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(table(torch.randint(17, (12,)))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(net)
    statistics = hvd.allgather_object(net[1].running_mean.tolist())
    assert len(set(map(tuple, statistics))) == hvd.size()
