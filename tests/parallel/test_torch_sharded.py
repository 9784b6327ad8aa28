# SPDX-License-Identifier: Apache-2.0
"""shard_state=True: the same training as with the plain optimizer, each rank keeping a part of its
state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole as fd
import farandole.torch as hvd
from farandole.calls import leases
from farandole.extras.sharded import sending as shard_sending
from harness.sharded import (
    MAKES,
    assert_states_equal,
    same_on_all,
    sharded,
)
from harness.toys import (
    assert_same,
    batch,
    joined,
    loss_of,
    network,
    push_each,
    total,
    toys,
    train,
    train_both,
)

together = pytest.mark.ranks(2, 3, 4)


# ---- equal to one process


@pytest.mark.parametrize("name", MAKES)
def test_trains_as_one_process(name: str) -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model, MAKES[name]), MAKES[name](reference.parameters())
    train_both(model, optimizer, reference, alone, range(8))
    same_on_all(model)
    assert_states_equal(optimizer.state_dict(), alone.state_dict())


@together
def test_each_rank_keeps_its_part() -> None:
    model = nn.Linear(40, 30)
    optimizer = sharded(model)
    for _ in range(2):
        model(torch.ones(3, 40)).sum().backward()
        optimizer.step()
    kept = sum(x.numel() for s in optimizer.state.values() for x in s.values() if x.dim())
    numbers = hvd.allgather(torch.tensor([kept]))
    assert int(numbers.sum()) == 3 * (40 * 30 + 30)
    assert int(numbers.max() - numbers.min()) <= 6  # a parameter's elements divide unevenly
    assert type(optimizer).__name__ == "Adam"
    assert isinstance(optimizer, torch.optim.Adam)


@together
def test_whole_gradients_are_freed_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2: once reduced, a gradient's memory goes back, and `.grad` is a part."""
    monkeypatch.setattr(shard_sending, "ROOM", 0)
    monkeypatch.setattr(shard_sending, "_PATIENCE", 60.0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = sharded(model)
    seen: list[int] = []

    def look(_grad: Tensor) -> None:
        """Of the first layer, whose gradients come last."""
        for gradient in optimizer._reducer.sent:
            kept: Any = leases._held[gradient.handle]
            assert kept.data_ptr() == gradient.encoded.data_ptr()
            assert gradient.encoded is gradient.grad
            assert gradient.encoded.numel() <= -(-gradient.parameter.numel() // hvd.size())
            seen.append(gradient.handle)

    model[0].weight.register_hook(look)
    model(torch.ones(2, 64)).sum().backward()
    assert len(seen) >= 6
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.shape == p.shape


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, last = model[0], model[2]  # type: ignore[index]
    return torch.optim.AdamW(
        [
            {"params": first.parameters(), "lr": 0.03, "betas": (0.8, 0.9)},
            {"params": last.parameters(), "weight_decay": 0.2},
        ],
        lr=0.01,
    )


def test_groups_and_schedulers() -> None:
    """A scheduler made before, and one made after."""
    models = network(), network()
    plain, alone = two_groups(models[0]), two_groups(models[1])
    before = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (plain, alone)]
    optimizer = hvd.DistributedOptimizer(plain, shard_state=True)
    after = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, alone)]
    for step in range(6):
        train(models[0], optimizer, range(step, step + 1))
        train(models[1], alone, range(step, step + 1), alone=True)
        for scheduler in (*before, *after):
            scheduler.step()
        lrs = [[group["lr"] for group in o.param_groups] for o in (optimizer, alone)]
        assert lrs[0] == lrs[1]
    assert_same(*models)


def test_frozen_unused_and_tied_parameters() -> None:
    """Those without a gradient on any rank are not stepped, nor decayed; one of few ranks' is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.one, self.two = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
            self.unused, self.frozen = nn.Linear(3, 3).double(), nn.Linear(5, 5).double()
            self.first_only, self.scale = nn.Linear(5, 1).double(), nn.Parameter(torch.tensor(2.0))
            self.two.weight = self.one.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor, first: bool) -> Tensor:
            y = self.frozen(self.two(self.one(x).tanh())).sum(1) * self.scale
            return y + self.first_only(x)[:, 0] if first else y

    model, reference = Net(), Net()
    optimizer, alone = sharded(model, MAKES["AdamW"]), MAKES["AdamW"](reference.parameters())
    for step in range(5):
        x = [batch(rank, step)[0] for rank in range(hvd.size())]
        if step == 3:
            model.frozen.requires_grad_(True)
            reference.frozen.requires_grad_(True)
        optimizer.zero_grad()
        model(x[hvd.rank()], first=hvd.rank() == 0).square().mean().backward()
        optimizer.step()
        alone.zero_grad()
        terms = [reference(x[rank], rank == 0).square().mean() for rank in range(hvd.size())]
        torch.stack(terms).mean().backward()
        alone.step()
    assert_same(model, reference)
    assert_states_equal(optimizer.state_dict(), alone.state_dict())
    unused = dict(model.named_parameters())["unused.weight"]
    assert unused.grad is None


def test_mixed_dtypes_and_layouts() -> None:
    """float32, bfloat16, channels last, no elements, one element."""

    def make() -> list[nn.Parameter]:
        torch.manual_seed(2)
        conv = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
        return [
            nn.Parameter(torch.randn(7, 5)),
            nn.Parameter(torch.randn(9).bfloat16()),
            nn.Parameter(conv),
            nn.Parameter(torch.randn(5, 3).t()),
            nn.Parameter(torch.empty(0, 3)),
            nn.Parameter(torch.randn(())),
            nn.Parameter(torch.randn(1)),
        ]

    own, others = make(), make()
    strides = [p.stride() for p in own]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(own, lr=0.1), shard_state=True)
    alone = torch.optim.Adam(others, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        for p, q in zip(own, others, strict=True):
            (p.sin() * (1 + hvd.rank()) * (step + 1)).sum().backward()
            (q.sin() * (1 + hvd.size()) / 2 * (step + 1)).sum().backward()
        optimizer.step()
        alone.step()
    for p, q, stride in zip(own, others, strides, strict=True):
        assert p.stride() == stride
        tolerance = 2e-2 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    full, expected = optimizer.state_dict(), alone.state_dict()
    for number, state in full["state"].items():
        for key, value in state.items():
            assert value.shape == expected["state"][number][key].shape
            assert value.stride() == expected["state"][number][key].stride()


# ---- the recipes


def test_passes_per_step_and_no_sync() -> None:
    model, reference = network(), network()
    optimizer = sharded(model, backward_passes_per_step=2)
    alone = MAKES["Adam"](reference.parameters())
    for step in range(4):
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        loss_of(model, batch(hvd.rank(), step, 1)).backward()
        with optimizer.no_sync():
            loss_of(model, batch(hvd.rank(), step, 2)).backward()
        optimizer.step()
        for part in range(3):
            loss_of(reference, joined(step, part)).backward()
        alone.step()
    assert_same(model, reference)


def test_accumulated_passes_are_reduced_at_once() -> None:
    """Not one by one, which no minimum could be taken of."""
    ps, optimizer = toys(2, shard_state=True, op=hvd.Min, backward_passes_per_step=2)
    for k in range(2):
        push_each(*((p, k) for p in ps))
    optimizer.step()
    assert [p.tolist() for p in ps] == [[-total(hvd.Min, [0, 1], [0])] * 4] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_that_nobody_announced(set_to_none: bool) -> None:
    """Two backward passes before a step; and no zero_grad() after some steps."""
    model, reference = network(), network()
    optimizer, alone = sharded(model), MAKES["Adam"](reference.parameters())
    for step in range(4):
        if step != 2:
            optimizer.zero_grad(set_to_none=set_to_none)
            alone.zero_grad(set_to_none=set_to_none)
        for part in range(2):
            loss_of(model, batch(hvd.rank(), step, part)).backward()
            loss_of(reference, joined(step, part)).backward()
        optimizer.step()
        alone.step()
    assert_same(model, reference)


@together
def test_a_pass_that_gives_a_parameter_no_gradient_keeps_the_reduced_one() -> None:
    """Autograd visits the parameter, with None, after a reduction."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad

    (p, q), optimizer = toys(2, shard_state=True)
    ((hvd.rank() + 1) * p + q).sum().backward()
    apply: Any = Nothing.apply
    apply(p, q).sum().backward()
    optimizer.step()
    assert p.tolist() == [-(1 + hvd.size()) / 2] * 4
    assert q.tolist() == [-2.0] * 4


def test_clipping_by_the_global_norm() -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model, MAKES["SGD"]), MAKES["SGD"](reference.parameters())
    for step, order in enumerate((2.0, 1.0, float("inf"))):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        norm = optimizer.clip_grad_norm_(0.05, order)
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, joined(step)).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, order)
        alone.step()
        torch.testing.assert_close(norm, expected)
    assert_same(model, reference)


@together
def test_clipping_by_torch_is_refused() -> None:
    model = network()
    optimizer = sharded(model)
    loss_of(model, batch(hvd.rank(), 0)).backward()
    with pytest.raises(RuntimeError, match=r"of 0\.weight: with shard_state=True .*clip_grad_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    same_on_all(model)


def test_scaling_zeroing_and_clamping_gradients_in_place() -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model, MAKES["SGD"]), MAKES["SGD"](reference.parameters())
    for step in range(3):
        for net, own, alone_ in ((model, optimizer, False), (reference, alone, True)):
            own.zero_grad()
            loss_of(net, joined(step) if alone_ else batch(hvd.rank(), step)).backward()
            if not alone_:
                own.synchronize()
            for p in net.parameters():
                assert p.grad is not None
                p.grad *= 3
                p.grad.div_(2.0).clamp_(-0.3, 0.3)
            own.step()
    assert_same(model, reference)


@pytest.mark.parametrize("unscale", [True, False])
def test_grad_scaler(unscale: bool) -> None:
    """As in torch's documentation; an infinity in one rank's part skips the step of all."""
    model, reference = network(), network()
    optimizer, alone = sharded(model, MAKES["SGD"]), MAKES["SGD"](reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, batch(hvd.rank(), step))
        scaler.scale(loss).backward()
        if step == 2:
            optimizer.synchronize()
            grad: Any = model[0].weight.grad
            part = grad if hvd.size() == 1 else grad.shard
            if hvd.rank() == 0:
                part.view(-1)[0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            alone.zero_grad()
            loss_of(reference, joined(step)).backward()
            if unscale:
                nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            alone.step()
        assert len(set(hvd.allgather_object(scaler.get_scale()))) == 1
    assert_same(model, reference)


def test_a_closure() -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model, MAKES["SGD"]), MAKES["SGD"](reference.parameters())
    for step in range(3):

        def own(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(hvd.rank(), step))
            loss.backward()
            return loss

        before = loss_of(model, batch(hvd.rank(), step)).item()
        assert optimizer.step(own).item() == before
        train(reference, alone, range(step, step + 1), alone=True)
    assert_same(model, reference)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_as_the_plain_optimizer(options: dict[str, Any]) -> None:
    model, reference = network(), network()
    optimizer = sharded(model, MAKES["SGD"], **options)
    plain = hvd.DistributedOptimizer(MAKES["SGD"](reference.parameters()), **options)
    train(model, optimizer, range(4))
    train(reference, plain, range(4))
    tolerance = 1e-3 if "compression" in options else 1e-9
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    same_on_all(model)


def test_means_and_weights_as_the_plain_optimizer() -> None:
    model, reference = network(), network()
    options: dict[str, Any] = {"accumulate": "mean", "backward_passes_per_step": 2}
    optimizer = sharded(model, **options)
    plain = hvd.DistributedOptimizer(MAKES["Adam"](reference.parameters()), **options)
    for step in range(4):
        for net, own in ((model, optimizer), (reference, plain)):
            own.zero_grad()
            own.set_weight(1.0 + hvd.rank())
            for part in range(2 + step % 2):
                loss_of(net, batch(hvd.rank(), step, part)).backward()
            own.step()
    assert_same(model, reference)


def test_after_a_restart() -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model), MAKES["Adam"](reference.parameters())
    train(model, optimizer, range(3))
    hvd.shutdown()
    hvd.init()
    train(reference, alone, range(3), alone=True)
    train_both(model, optimizer, reference, alone, range(3, 6))


@together
def test_all_ranks_refuse_and_go_on() -> None:
    model = network()
    optimizer = sharded(model)
    whole = model[0].weight.data
    for _ in range(2):
        loss_of(model, batch(hvd.rank(), 0)).backward()
        optimizer.synchronize()
        model[0].weight.data = whole.clone().t().contiguous().t()  # another order in memory
        with pytest.raises(RuntimeError, match=r"0\.weight was .*before DistributedOptimizer"):
            optimizer.step()
        model[0].weight.data = whole
        optimizer.zero_grad()
    train(model, optimizer, range(2))
    same_on_all(model)


@pytest.mark.ranks(3, 4)
def test_in_a_process_set() -> None:
    members = fd.add_process_set([0, 2])
    model, reference = network(), network()
    optimizer = sharded(model, process_set=members)
    plain = hvd.DistributedOptimizer(MAKES["Adam"](reference.parameters()), process_set=members)
    train(model, optimizer, range(4))
    train(reference, plain, range(4))
    assert_same(model, reference)
    assert_states_equal(optimizer.state_dict(), plain.state_dict())
    fd.remove_process_set(members)
