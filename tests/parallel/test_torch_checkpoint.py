# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is resumed goes on bit for bit as if nobody had disturbed it."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import farandole as fd
import farandole.torch as hvd
from farandole.torch import elastic
from harness.checkpoints import bits, folder
from harness.feedback import KINDS

__all__ = ["folder"]

EPOCHS, SAMPLES, BATCH = 3, 26, 2


class Augmented(Dataset[Any]):
    """Its samples are changed at random, by all three generators of the process that loads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((3,), index + noise + 100.0 * fd.rank())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for i in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1):
            yield Augmented()[i]


class Training:
    """Differs by rank in data, buffers and random draws; `trace` tells all that happened."""

    def __init__(self, loader: DataLoader[Any], sampler: Any = None) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)
        )
        plain = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(plain, self.model.named_parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 4, 9])
        self.loader = hvd.ResumableLoader(loader)
        self.sampler = sampler
        self.epoch = 0
        self.trace: list[Any] = []
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(1000 + fd.rank())

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "loader", "epoch")
        state = {name: getattr(self, name) for name in names}
        return state | ({"sampler": self.sampler} if self.sampler is not None else {})

    def train(self, save_at: int = -1, folder: Path | None = None, wait: bool = True) -> None:
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            for number, batch in enumerate(self.loader):
                self.optimizer.zero_grad()
                self.model(batch.repeat(2, 1)).pow(2).mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                if self.sampler is not None:
                    self.sampler.record_batch(number, BATCH)
                draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
                self.trace.append((epoch, batch.tolist(), draws))
                if len(self.trace) == save_at:
                    assert folder is not None
                    hvd.save_checkpoint(folder, self.state, wait=wait)
                    return
            if self.sampler is not None:
                self.sampler.set_epoch(epoch + 1)

    def end(self) -> Any:
        names = ("model", "optimizer", "scheduler")
        states = {name: getattr(self, name).state_dict() for name in names}
        return bits([states, random.random(), np.random.rand(4), torch.rand(4)])


def loader_of(kind: str, workers: int) -> tuple[DataLoader[Any], Any]:
    """A loader as users make them, and an ElasticSampler if it has one."""
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": workers,
        "timeout": 60 * (workers > 0),
    }
    if kind == "stream":
        return DataLoader(Stream(), **options), None
    if kind == "elastic":
        sampler = elastic.ElasticSampler(Augmented(), seed=3)
        return DataLoader(Augmented(), sampler=sampler, **options), sampler
    generator = torch.Generator().manual_seed(7 + fd.rank()) if kind == "generator" else None
    return DataLoader(Augmented(), shuffle=True, generator=generator, **options), None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "generator", "elastic", "stream"])
def test_training_goes_on_bit_for_bit(folder: Path, kind: str, workers: int) -> None:
    whole = Training(*loader_of(kind, workers))
    whole.train()
    steps = len(whole.trace)
    end = whole.end()
    saved_at = steps // 2  # in the middle of an epoch
    first = Training(*loader_of(kind, workers))
    first.train(saved_at, folder, wait=workers == 0)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(99)  # as another process would have it
    second = Training(*loader_of(kind, workers))
    with torch.no_grad():
        for p in second.model.parameters():
            p.fill_(float(fd.rank()))
    rest = hvd.load_checkpoint(folder, second.state)
    assert rest is not None
    second.epoch = rest["epoch"]
    torch.rand(3)  # what a program draws before its loop
    second.train()
    assert first.trace == whole.trace[:saved_at]
    assert second.trace == whole.trace[saved_at:]
    assert second.end() == end


def test_resumed_twice_and_between_epochs(folder: Path) -> None:
    whole = Training(*loader_of("shuffled", 2))
    whole.train()
    end, steps = whole.end(), len(whole.trace)
    trace: list[Any] = []
    at = 0
    for save_at in (1, steps // EPOCHS, steps // EPOCHS + 1, -1):  # one is at the end of an epoch
        training = Training(*loader_of("shuffled", 2))
        rest = hvd.load_checkpoint(folder, training.state)
        assert (rest is None) == (at == 0)
        training.epoch = rest["epoch"] if rest else 0
        training.train(save_at - at if save_at > 0 else -1, folder)
        trace += training.trace
        at = len(trace)
    assert trace == whole.trace
    assert training.end() == end


def test_a_loop_that_is_left_begins_its_next_epoch_anew() -> None:
    loader = hvd.ResumableLoader(DataLoader(range(6)))
    for batch in loader:
        if int(batch) == 2:
            assert loader.state_dict()["taken"] == 3
            break
    assert loader.state_dict()["begun"] is None
    assert [int(x) for x in loader] == list(range(6))
    with pytest.raises(ValueError, match="persistent_workers"):
        hvd.ResumableLoader(DataLoader(range(6), num_workers=1, persistent_workers=True))


def some_state() -> dict[str, Any]:
    x = torch.arange(6.0).reshape(2, 3)
    return {
        "rank": fd.rank(),
        "numbers": [1, -(2**70), 0.1, 1e-300, float("inf"), True, None, "text \ud800 ü"],
        "dicts": {1: "a", "b": {2.5: (1, (2,))}, "$": [], None: OrderedDict(z=1, a=2)},
        "counter": Counter({3: 4}),
        "tensors": [x, x.T, x[:, 1], torch.tensor(3), torch.zeros(0, 2), torch.tensor(True)],
        "dtypes": [torch.ones(2, dtype=t) for t in (torch.bfloat16, torch.int8, torch.complex64)],
        "lazy": torch.tensor([1 + 2j]).conj(),
        "arrays": [
            np.arange(4, dtype=np.uint32),
            np.float64(0.1),
            np.array(3, "<M8[s]"),
            np.bool_(),
        ],
        "own": {"buffer": torch.full((2,), float(fd.rank())), "a.b": x, "a": {"b": x + 1}},
    }


def test_values_come_back_as_they_were(folder: Path) -> None:
    state = some_state()
    hvd.save_checkpoint(folder, state)
    found = hvd.load_checkpoint(folder, {})
    assert found is not None
    state["lazy"] = state["lazy"].resolve_conj()
    assert bits(found) == bits(state)
    for name in ("numbers", "dicts", "counter"):
        assert repr(found[name]) == repr(state[name])
    assert [type(x) for x in found["arrays"]] == [type(x) for x in state["arrays"]]
    assert found["arrays"][2].dtype == "<M8[s]"


def test_what_is_equal_is_there_once(folder: Path) -> None:
    """The library of the format reads the model by its own names."""
    model = nn.Linear(300, 100)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    path = hvd.save_checkpoint(folder, {"model": model, "own": torch.tensor([fd.rank()])}).wait()
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("model.weight"), model.weight)
        own = [name for name in file.keys() if name.endswith("own")]  # noqa: SIM118
    assert len(own) == fd.size()
    assert path.stat().st_size < 30_000 * 4 + 30_000 * fd.size()
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Umask")).split()[1], 8)


def test_only_the_last_stay(folder: Path) -> None:
    for step in range(5):
        path = hvd.save_checkpoint(folder, {"step": step}, keep=2).wait()
        assert path.name == f"checkpoint-{step + 1:08}.safetensors"
    if fd.rank() == 0:
        assert sorted(path.name[11:19] for path in folder.iterdir()) == ["00000004", "00000005"]
    assert hvd.load_checkpoint(folder, {}) == {"step": 4}
    assert hvd.load_checkpoint(path.with_name("checkpoint-00000004.safetensors"), {}) == {"step": 3}


def test_a_folder_without_checkpoints_is_no_error(folder: Path) -> None:
    assert hvd.load_checkpoint(folder / "none", {}) is None
    assert hvd.load_checkpoint(folder, {}) is None


def test_training_goes_on_while_it_is_written(folder: Path) -> None:
    x = torch.full((1 << 20,), float(fd.rank()))
    handles = []
    for step in range(3):
        handles.append(hvd.save_checkpoint(folder, {"x": x, "step": step}, wait=False))
        x += 1.0
    assert [handle.wait().name[18] for handle in handles] == ["1", "2", "3"]
    for step, handle in enumerate(handles):
        found = hvd.load_checkpoint(handle.wait(), {})
        assert found is not None
        assert found["step"] == step
        assert bool((found["x"] == fd.rank() + step).all())


# ---- another number of ranks


def learn(optimizer: Any, model: nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + fd.rank())
        model(torch.randn(3, 70, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def test_a_sharded_optimizer_at_any_number_of_ranks(folder: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(70, 11), nn.Linear(11, 1))
    optimizer = optimizer_of(model, shard_state=True)
    learn(optimizer, model, range(3))
    state = {"model": model, "optimizer": optimizer}
    hvd.save_checkpoint(folder, state, wait=False)
    for p in model.parameters():
        assert p.untyped_storage().resizable()  # as FSDP needs it
    then = bits(optimizer.state_dict())
    learn(optimizer, model, range(3, 5))
    undisturbed = bits(model.state_dict())
    assert hvd.load_checkpoint(folder, state) == {}
    assert bits(optimizer.state_dict()) == then
    learn(optimizer, model, range(3, 5))
    assert bits(model.state_dict()) == undisturbed
    few = fd.add_process_set(range(1 + fd.size() // 2)) if fd.size() > 2 else None
    if few is not None and few.included():
        for sharded in (True, False):
            fewer = optimizer_of(model, shard_state=sharded, process_set=few)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of rank 0, on random numbers
                hvd.load_checkpoint(folder, {"model": model, "optimizer": fewer}, process_set=few)
            assert bits(fewer.state_dict()) == then
        with pytest.raises(ValueError, match="give both the same process_set"):
            hvd.save_checkpoint(folder, state, process_set=few)
    if few is not None:
        fd.remove_process_set(few)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["topk", "powersgd", "int8", "onebit"])
def test_residuals_belong_to_a_checkpoint(folder: Path, kind: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(70, 93)
    optimizer = optimizer_of(model, compression=KINDS[kind]())
    state = {"model": model, "optimizer": optimizer}
    learn(optimizer, model, range(3))
    hvd.save_checkpoint(folder, state)
    learn(optimizer, model, range(3, 6))
    undisturbed = bits(model.state_dict()), bits(optimizer.compression_state_dict())
    hvd.load_checkpoint(folder, state)
    learn(optimizer, model, range(3, 6))
    assert (bits(model.state_dict()), bits(optimizer.compression_state_dict())) == undisturbed
    for plain in (optimizer_of(model), optimizer_of(model, shard_state=True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.load_checkpoint(folder, {"model": model, "optimizer": plain})
        told = [str(w.message) for w in caught if "does not compress weight" in str(w.message)]
        assert len(told) == (fd.rank() == 0)
        assert [w.filename for w in caught if "does not" in str(w.message)] == [__file__] * len(
            told
        )
    if fd.rank() == 0:  # of one that never compressed
        torch.save({"optimizer": optimizer.state_dict()}, folder / "old.pt")
    hvd.load_checkpoint(folder / "old.pt", {"optimizer": optimizer})
    assert optimizer.compression_state_dict() == {"weight": {}}


@pytest.mark.ranks(2, 4)
def test_another_number_of_ranks(folder: Path) -> None:
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(fd.rank())  # type: ignore[operator, union-attr]
    data = range(24)
    sampler = elastic.ElasticSampler(data, seed=3)
    first = list(sampler)[:3]
    sampler.record_batch(0, 3)
    state = {"model": model, "sampler": sampler, "epoch": 5, "r": fd.rank()}
    hvd.save_checkpoint(folder, state | {"generator": torch.Generator().manual_seed(fd.rank())})
    half = fd.add_process_set(range(fd.size() // 2))
    if half.included():
        torch.manual_seed(fd.rank())
        draws = torch.rand(3).tolist()
        torch.manual_seed(fd.rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = hvd.load_checkpoint(folder, state, process_set=half)
        assert [
            str(w.message) for w in caught if "were" in str(w.message) or "ranks" in str(w.message)
        ] == ([str(caught[0].message)] if fd.rank() == 0 else [])
        assert rest is not None
        assert rest["epoch"] == 5
        assert rest["r"] == 0
        assert model.running_mean.tolist() == [0.0, 0.0]  # type: ignore[operator, union-attr]
        assert torch.rand(3).tolist() == draws
    fd.remove_process_set(half)
    sampler.reset()  # where nothing was loaded
    done = {i for part in fd.allgather_object(first) for i in part}
    left = {i for part in fd.allgather_object(list(sampler)) for i in part}
    assert done | left == set(data)
    assert not done & left
