# SPDX-License-Identifier: Apache-2.0
"""A sampler that divides what is left of an epoch, also among another number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from farandole import topology

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Gives each rank its part of the indices that record_batch has not counted yet.

    All ranks get equally many: where they do not divide evenly, some indices come twice.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """`shuffle`: in an order of its own for each epoch and `seed`, equal on all ranks."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch, over all ranks
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of `batch_size` samples on every rank; what counts is that they are done,
        not which: `batch_idx` is accepted for Horovod's sake."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Divides what is left of the epoch among the ranks there are now."""
        self.num_replicas, self.rank = 1, 0
        if topology.is_initialized():
            self.num_replicas, self.rank = topology.size(), topology.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(indices)
        left = indices[self.processed_num :]
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        repeats = -(-self.total_size // len(left)) if left else 0
        self.remaining_indices = left
        self._own = (left * repeats)[self.rank : self.total_size : self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """Where in which epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on there."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return self.num_samples
