# SPDX-License-Identifier: Apache-2.0
"""torch's DataLoader: its forked workers know where their rank stands, and are told the rest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import farandole as fd
import farandole.torch as hvd

QUESTIONS: tuple[Callable[[], Any], ...] = (
    hvd.rank,
    hvd.size,
    hvd.local_rank,
    hvd.local_size,
    hvd.cross_rank,
    hvd.cross_size,
    hvd.is_homogeneous,
    hvd.is_initialized,
)

OTHERS: dict[str, Callable[[], object]] = {
    "allreduce": lambda: hvd.allreduce(torch.ones(2), name="of a worker"),
    "barrier": lambda: fd.barrier(),
    "broadcast_object": lambda: hvd.broadcast_object({}, 0),
    "init": hvd.init,
    "metrics": fd.metrics,
    "start_timeline": lambda: fd.start_timeline("/nowhere/trace.json"),
}


class Numbers(IterableDataset[int]):
    """The usual way to share a stream: each worker of each rank takes its part."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        part = hvd.rank() * info.num_workers + info.id
        yield from range(part, self.count, hvd.size() * info.num_workers)


def test_an_iterable_dataset_is_shared_out() -> None:
    seeds: list[int] = []

    def seed(worker: int) -> None:
        torch.manual_seed(1000 * hvd.rank() + worker)

    for _ in range(2):  # workers of a second epoch
        loader = DataLoader(
            Numbers(100), batch_size=None, num_workers=2, worker_init_fn=seed, timeout=60
        )
        seeds = [int(x) for x in loader]
        parts = hvd.allgather_object(seeds)
        assert sorted(x for part in parts for x in part) == list(range(100))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


class Asked(IterableDataset[Any]):
    """What a worker learns about itself."""

    def __iter__(self) -> Iterator[Any]:
        yield [question() for question in QUESTIONS]
        for name, call in OTHERS.items():
            try:
                call()
                yield f"{name} did not raise"
            except hvd.ShutdownError as error:
                yield str(error)


def test_a_worker_knows_where_its_rank_stands() -> None:
    loader = DataLoader(Asked(), batch_size=None, num_workers=1, timeout=60)
    answers, *texts = list(loader)
    assert answers == [question() for question in QUESTIONS]
    assert len(texts) == len(OTHERS)
    for name, text in zip(OTHERS, texts, strict=True):
        assert f"forked from rank {hvd.rank()}" in text, name
        assert "rank(), size()" in text, name  # what works there
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def _answer(queue: Any) -> None:
    found: list[Any] = [hvd.is_initialized()]
    try:
        hvd.rank()
    except ValueError as error:
        found.append(str(error))
    queue.put(found)


def test_a_child_forked_while_the_runtime_is_down() -> None:
    hvd.shutdown()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_answer, args=(queue,))
    child.start()
    initialised, text = queue.get(timeout=60)
    child.join(60)
    assert not initialised
    assert "has not been initialized" in text
    hvd.init()


@pytest.mark.ranks(2)
def test_a_worker_keeps_its_answers_when_its_rank_has_left() -> None:
    loader = iter(DataLoader(Numbers(100), batch_size=None, num_workers=2, timeout=60))
    first = next(loader)
    hvd.shutdown()
    rest = [int(x) for x in loader]
    hvd.init()
    parts = hvd.allgather_object([int(first), *rest])
    assert sorted(x for part in parts for x in part) == list(range(100))
