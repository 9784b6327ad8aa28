# SPDX-License-Identifier: Apache-2.0
"""ElasticSampler divides the rest of an epoch among the ranks that the job has now."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from farandole import topology


class ElasticSampler(Sampler[int]):
    """Gives each rank its part of the indices that record_batch() has not counted yet.

    As with Horovod, all ranks get the same number of indices. If the indices do not divide evenly,
    up to size - 1 indices occur twice at the end of an epoch. With `even=False`, each index occurs
    once, and the first ranks may get one index more than the rest. A rank that has no batch left
    calls hvd.join() while the other ranks train.

    Examples:
        >>> sampler = ElasticSampler(range(5), shuffle=False, even=False)
        >>> list(sampler)
        [0, 1, 2, 3, 4]
        >>> sampler.record_batch(0, 3)
        >>> sampler.reset()
        >>> list(sampler)
        [3, 4]
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, even: bool = True
    ) -> None:
        """If `shuffle` is True, the order is random. It depends only on the epoch and on `seed`."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.even = even
        self.epoch = 0
        self.processed_num = 0  # number of samples of this epoch, over all ranks
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch. None of its samples is processed yet."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Divides the rest of the epoch among the present ranks."""
        self.num_replicas, self.rank = 1, 0
        if topology.is_initialized():
            self.num_replicas, self.rank = topology.size(), topology.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(indices)
        left = indices[self.processed_num :]
        self.remaining_indices = left
        self._counted_before = self.processed_num
        self._recorded = self._longest_batch = 0  # samples on this rank, since reset()
        # Pads with the epoch's first indices, as torch's DistributedSampler does.
        missing = -len(left) % self.num_replicas if self.even else 0
        padded = left + [indices[i % len(indices)] for i in range(missing)]
        self.total_size = len(padded)
        self._own = padded[self.rank :: self.num_replicas]
        self.num_samples = len(self._own)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of `batch_size` samples on every rank.

        `batch_idx` is accepted for compatibility with Horovod, and ignored.
        """
        self._longest_batch = max(self._longest_batch, batch_size)
        self._recorded += batch_size
        ended = self._recorded >= len(self._own) and not self.even
        # A rank that has one sample more than this rank may have a longer last batch.
        longest = self._recorded - batch_size + self._longest_batch if ended else self._recorded
        counted = longest * self.num_replicas
        self.processed_num = self._counted_before + (
            counted if self.even else min(counted, self.total_size)
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and the number of samples that were processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the epoch and sample that state_dict() has returned."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return self.num_samples
