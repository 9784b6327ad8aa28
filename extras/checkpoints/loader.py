# SPDX-License-Identifier: Apache-2.0
"""ResumableLoader: a DataLoader whose place within an epoch is kept in checkpoints. For users'
training loops, on their thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from farandole import is_initialized, size
from farandole.extras.checkpoints.state import random_state, set_random_state

T_co = TypeVar("T_co", covariant=True)


class ResumableLoader(Generic[T_co]):
    """Gives the batches of a DataLoader, and after a load_checkpoint() those that are left.

    They are bit for bit those that an undisturbed run would have got. The epoch starts again with
    the random generators as they were at its start. The batches that the program had taken are
    loaded once more and dropped. Then the generators go on from where the checkpoint left them. So
    random augmentation in workers, shuffling samplers and iterable datasets are exact too; what
    workers had only prefetched was not taken. Save after the step on a batch, before the next is
    taken. A loop left by `break` ends the epoch. If the number of ranks has changed, the rest of
    the epoch is divided again if the sampler is an ElasticSampler that is part of the checkpoint
    too; else the epoch starts again, with a warning.

    Examples:
        >>> loader = hvd.ResumableLoader(torch.utils.data.DataLoader(range(8), batch_size=2))
        >>> [int(batch.sum()) for batch in loader]
        [1, 5, 9, 13]
    """

    def __init__(self, loader: DataLoader[T_co]) -> None:
        """`loader`: with any sampler and workers that live for one epoch. Raises ValueError for
        persistent_workers=True: their generators depend on all epochs before."""
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"loader is of type {type(loader).__name__}: pass a torch.utils.data.DataLoader"
            )
        if loader.persistent_workers:
            raise ValueError(
                "persistent_workers=True: what such a worker draws at random depends on all epochs "
                "before, which no checkpoint brings back; leave it out"
            )
        self.loader = loader
        self._sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._begun: dict[str, Any] | None = None  # the generators when the epoch began; None: none
        self._taken = 0
        self._now: dict[str, Any] | None = None  # those of a checkpoint that is to be gone on from
        self._iteration = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[T_co]:
        self._iteration += 1
        mine, now = self._iteration, self._now
        if now is None:
            self._begun, self._taken = self._generators(), 0
            batches = iter(self.loader)
        else:
            assert self._begun is not None
            self._set(self._begun)
            batches = iter(self.loader)
            for _ in range(self._taken):
                next(batches)
            self._set(now)
            self._now = None
        try:
            for batch in batches:
                self._taken += 1
                yield batch
        finally:
            if mine == self._iteration:
                self._begun, self._taken = None, 0

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come, and the generators then and now; none of its data."""
        now = self._now or (self._generators() if self._begun else None)
        return {"begun": self._begun, "now": now, "taken": self._taken, "ranks": _ranks()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lets the next iteration continue from a state_dict()."""
        here = state_dict["ranks"] == _ranks()
        for name in ("begun", "now", "taken"):
            setattr(self, f"_{name}", state_dict[name] if here else None)
        if not here and state_dict["begun"] and not hasattr(self._sampler, "state_dict"):
            warnings.warn(
                f"the checkpoint was written by {state_dict['ranks']} ranks, and these are "
                f"{_ranks()}: the epoch starts again, because a place in it belongs to one number "
                "of ranks; with farandole.torch.elastic.ElasticSampler its rest is dealt out again",
                RuntimeWarning,
                stacklevel=2,
            )

    def _generators(self) -> dict[str, Any]:
        """What decides about the epoch's batches from here on."""
        found = {"global": random_state()}
        for name, owner in self._owners():
            found[name] = owner.get_state()
        if hasattr(self._sampler, "state_dict"):
            found["sampler"] = self._sampler.state_dict()
        return found

    def _set(self, generators: dict[str, Any]) -> None:
        set_random_state(generators["global"])
        for name, owner in self._owners():
            owner.set_state(generators[name])
        if "sampler" in generators:
            self._sampler.load_state_dict(generators["sampler"])

    def _owners(self) -> list[tuple[str, Any]]:
        """Generators of the user's own: that of the loader, that of its sampler."""
        holders = (("loader", self.loader), ("of the sampler", self._sampler))
        found = [(name, getattr(holder, "generator", None)) for name, holder in holders]
        return [(name, owner) for name, owner in found if owner is not None]


def _ranks() -> int:
    return size() if is_initialized() else 1
