# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm equals BatchNorm on the joined batch."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd


def batch(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rank + 2, *shape, generator=generator, dtype=torch.float64)
    return (x * (1 + rank) + 10 * rank).to(dtype)


def part(rank: int) -> slice:
    """A rank's rows of the joined batch."""
    begin = sum(r + 2 for r in range(rank))
    return slice(begin, begin + rank + 2)


CASES = [((3,), torch.float64), ((3, 5), torch.float32), ((3, 4, 4), torch.float64)]
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_equals_the_joined_batch(
    shape: tuple[int, ...], dtype: torch.dtype, affine: bool, momentum: float | None
) -> None:
    plain = PLAIN[len(shape)](3, momentum=momentum, affine=affine, dtype=dtype)
    if affine:
        with torch.no_grad():
            plain.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            plain.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    layer = hvd.SyncBatchNorm(3, momentum=momentum, affine=affine).to(dtype)
    layer.load_state_dict(plain.state_dict())
    mine = part(hvd.rank())
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
    for step in range(2):
        joined = torch.cat([batch(r, shape, dtype) + step for r in range(hvd.size())])
        joined.requires_grad_()
        own = joined.detach()[mine].clone().requires_grad_()
        slope = torch.arange(joined.numel(), dtype=dtype).view_as(joined).cos()
        expected = plain(joined)
        (expected * slope).sum().backward()
        y = layer(own)
        (y * slope[mine]).sum().backward()
        torch.testing.assert_close(y, expected[mine], **tolerance)
        torch.testing.assert_close(own.grad, joined.grad[mine], **tolerance)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict(), **tolerance)
        if affine:
            for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
                total = hvd.allreduce(p.grad, op=hvd.Sum)
                torch.testing.assert_close(total, q.grad, **tolerance)
    layer.eval()
    plain.eval()
    torch.testing.assert_close(layer(own), plain(joined)[mine], **tolerance)


def test_float64_with_a_large_mean() -> None:
    plain, layer = nn.BatchNorm1d(3, eps=1e-12).double(), hvd.SyncBatchNorm(3, eps=1e-12).double()
    batches = [1e6 + 1e-3 * batch(r, (3,), torch.float64) for r in range(hvd.size())]
    expected, y = plain(torch.cat(batches))[part(hvd.rank())], layer(batches[hvd.rank()])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("others", [0, 3])
def test_an_empty_batch(others: int, momentum: float | None) -> None:
    layer = hvd.SyncBatchNorm(2, momentum=momentum)
    x = torch.randn(0 if hvd.rank() == 0 else others, 2, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert torch.isfinite(layer.running_mean).all()
    if not others:  # as in torch.nn.BatchNorm1d
        assert layer.running_var.tolist() == [1, 1]
        assert layer.weight.grad.tolist() == [0, 0]


def test_two_layers_and_a_process_set() -> None:
    n = hvd.size()
    ranks = list(range(max(1, n - 1)))
    some = hvd.add_process_set(ranks) if len(ranks) < n else hvd.global_process_set
    model = nn.Sequential(
        hvd.SyncBatchNorm(2, process_set=some), nn.Tanh(), hvd.SyncBatchNorm(2, process_set=some)
    ).double()
    reference = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2)).double()
    if some.included():
        joined = torch.cat([batch(r, (2,), torch.float64) for r in ranks])
        own = batch(hvd.rank(), (2,), torch.float64)
        torch.testing.assert_close(model(own), reference(joined)[part(hvd.rank())])
    if some is not hvd.global_process_set:
        hvd.remove_process_set(some)


def test_convert() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(4)))
    parameters = list(model.parameters())
    state = model.state_dict()
    model.eval()
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm)
    assert isinstance(model[2][0], hvd.SyncBatchNorm)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model.state_dict().keys() == state.keys()
    assert not model[1].training
    assert hvd.convert_sync_batchnorm(model[1]) is model[1]


# ---- names


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Sequential(nn.BatchNorm1d(4))
    ).double()


def train(model: nn.Module, step: int = 0) -> Tensor:
    """One step on this rank's batch, without an optimizer; the output."""
    y = model(batch(hvd.rank(), (3,), torch.float64) + step)
    y.pow(3).sum().backward()
    return y.detach()


def as_joined(synced: nn.Module, plain: nn.Module, step: int = 0) -> None:
    """A step of `synced` gives what `plain` makes of the joined batch."""
    joined = torch.cat([batch(r, (3,), torch.float64) for r in range(hvd.size())]) + step
    expected = plain(joined)
    expected.pow(3).sum().backward()
    torch.testing.assert_close(train(synced, step), expected.detach()[part(hvd.rank())])
    for p, q in zip(synced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad)


def wire_names(model: nn.Module) -> list[str]:
    """Under which its layers are known after they have been used."""
    return [m._claim[1] for m in model.modules() if isinstance(m, hvd.SyncBatchNorm) and m._claim]


BUILD = {
    "converted": lambda: hvd.convert_sync_batchnorm(net()),
    "built": lambda: nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4), nn.Tanh()).double(),
}


@pytest.mark.parametrize("build", BUILD)
def test_what_one_rank_builds_alone_does_not_count(build: str) -> None:
    """As for an evaluation on rank 0, before or after the model."""
    alone = []
    if hvd.rank() == 0:
        alone += [BUILD["converted"](), BUILD["built"](), hvd.SyncBatchNorm(4)]
    models = [BUILD[build](), BUILD[build]()]
    if hvd.rank() == hvd.size() - 1:
        alone += [BUILD[build](), hvd.SyncBatchNorm(7)]
    for model in alone:
        model.eval()
        with torch.no_grad():
            model.double()(
                torch.ones(2, 7 if isinstance(model, hvd.SyncBatchNorm) else 3).double()[
                    :, : getattr(model, "num_features", 3)
                ]
            )
    for step in range(2):
        outputs = [train(model, step) for model in models]
    everyones = hvd.allgather_object([wire_names(model) for model in models])
    assert all(names == everyones[0] for names in everyones)
    assert outputs[0].shape == outputs[1].shape


def test_they_are_named_by_the_way_to_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.BatchNorm1d(3)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))])
            self.own = hvd.SyncBatchNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.blocks[0](self.stem(x)))

    model = hvd.convert_sync_batchnorm(Net().double())
    train(model)
    ways = ["Net.stem", "Net.blocks.0.1", "Net.own"]
    if hvd.size() > 1:
        names = wire_names(model)
        assert [name.partition("#")[0] for name in names] == [f"sync_batch_norm.{w}" for w in ways]
    named = hvd.convert_sync_batchnorm(Net().double(), name="teacher")
    assert named.stem._name == "teacher.stem"
    assert hvd.convert_sync_batchnorm(nn.BatchNorm1d(2))._name == "BatchNorm1d"


def test_ranks_that_disagree_hear_the_modules_name() -> None:
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    model = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(3 if hvd.rank() == 0 else 5))
    model = hvd.convert_sync_batchnorm(model, name="encoder")
    with pytest.raises(hvd.MismatchError, match=r"sync_batch_norm.encoder.1(#\d)?.forward"):
        model(torch.ones(2, model[1].num_features))


@pytest.mark.parametrize("when", ["before", "after"])
def test_deep_copies(when: str) -> None:
    """As of a moving average: trained beside its original, in one graph and by itself."""
    model, plain = hvd.convert_sync_batchnorm(net()), net()
    if when == "after":
        as_joined(model, plain)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    assert twin[1].process_set is hvd.global_process_set
    if hvd.rank() == 0:
        copy.deepcopy(model).eval()
    for step in range(2):
        as_joined(twin, plain_twin, step)
        as_joined(model, plain, step)
    x = batch(hvd.rank(), (3,), torch.float64)
    (model(x) * twin(x)).pow(3).sum().backward()
    names = [*wire_names(model), *wire_names(twin)]
    assert len(set(names)) == len(names)


def test_pickles() -> None:
    model, plain = hvd.convert_sync_batchnorm(net()), net()
    as_joined(model, plain)
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded[1]._name == model[1]._name
    assert loaded[1]._claim is None
    as_joined(loaded, pickle.loads(pickle.dumps(plain)), 1)  # neither has gradients


def test_two_models_in_two_threads() -> None:
    """In another order on each rank: names of their own make that right."""
    models = [hvd.convert_sync_batchnorm(net(i), name=f"model {i}") for i in range(2)]
    order = models if hvd.rank() % 2 == 0 else models[::-1]

    def steps(model: nn.Module) -> list[Tensor]:
        return [train(model, step) for step in range(5)]

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(map(id, order), pool.map(steps, order), strict=True))
    for i, model in enumerate(models):
        alone = hvd.convert_sync_batchnorm(net(i))
        for step, y in enumerate(results[id(model)]):
            torch.testing.assert_close(y, train(alone, step))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    """Layers run once more in the backward pass."""
    model, plain = hvd.convert_sync_batchnorm(net()), net()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    for step in range(2):
        as_joined(Checkpointed(), plain, step)


def test_a_module_in_two_places_stays_one() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": norm, "c": norm})
    hvd.convert_sync_batchnorm(model)
    assert isinstance(model["b"], hvd.SyncBatchNorm)
    assert model["a"][0] is model["b"] is model["c"]


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        hvd.SyncBatchNorm(2)(torch.zeros(2))
    wrong = [
        (ValueError, "2 dimensions", torch.zeros(3)),
        (ValueError, "3 channels", torch.zeros(4, 1)),
        (TypeError, "expected floats", torch.zeros(4, 3, dtype=torch.complex64)),
    ]
    layer = hvd.SyncBatchNorm(3, name="neck")
    for error, text, x in wrong:
        for who in {0, hvd.size() - 1}:
            with pytest.raises(error, match=f"neck.*{text}"):
                layer(x if hvd.rank() == who else torch.ones(4, 3))
    layer(torch.ones(4, 3))
