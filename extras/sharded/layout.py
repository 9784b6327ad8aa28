# SPDX-License-Identifier: Apache-2.0
"""How a sharded optimizer divides parameters and their state over the ranks, and puts state
together again. Without results to wait for: for ShardedOptimizer, and for users who join parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farandole import MismatchError

MEETING = "sharded optimizer"  # name of the call in which all ranks make one
LAYOUT = "layout"  # the key by which a part's state_dict differs from a full one


@dataclass(frozen=True)
class Part:
    """The elements of one parameter that one of `parts` ranks keeps, in the order of its memory.

    Low ranks keep one more where they do not divide evenly, as in reducescatter. A parameter of
    few elements stays whole, on the first rank, so that no piece has one element: state of shape
    (1,) that is none of the elements' (a count of steps) can't be taken for it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    part: int
    parts: int

    @classmethod
    def of(cls, x: Tensor, part: int, parts: int) -> Part:
        """For a parameter; raises ValueError for one whose elements do not fill its memory."""
        if not _is_dense(x):
            raise ValueError(
                f"shape {tuple(x.shape)} with strides {x.stride()} has gaps or overlaps in memory: "
                "make it contiguous"
            )
        return cls(tuple(x.shape), tuple(x.stride()), part, parts)

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return torch.Size(self.shape).numel()

    @property
    def whole(self) -> bool:
        """Whether one rank keeps all of it."""
        return self.parts == 1 or self.elements < 2 * self.parts

    @property
    def sent(self) -> tuple[int, ...]:
        """The shape whose rows reducescatter and allgather divide in this way."""
        return (1, self.elements) if self.whole else (self.elements,)

    @property
    def begin(self) -> int:
        """The first element kept."""
        return self._before(self.part)

    @property
    def count(self) -> int:
        """How many elements are kept."""
        return self._before(self.part + 1) - self._before(self.part)

    @property
    def held(self) -> bool:
        """Whether this rank keeps the parameter's state, if only part of it."""
        return self.count > 0 or (self.elements == 0 and self.part == 0)

    def _before(self, part: int) -> int:
        if self.whole:
            return self.elements if part > 0 else 0
        rows, more = divmod(self.elements, self.parts)
        return part * rows + min(part, more)

    def fits(self, x: Tensor) -> bool:
        """Whether `x` lies in memory as the parameter does."""
        triples = zip(self.shape, x.stride(), self.strides, strict=True)
        return x.shape == self.shape and all(n < 2 or a == b for n, a, b in triples)

    def flat(self, x: Tensor) -> Tensor:
        """The elements of a tensor of the parameter's shape, in this order: a view if it fits."""
        x = x.detach()
        if not self.fits(x):
            x = torch.empty_strided(self.shape, self.strides, dtype=x.dtype, device=x.device).copy_(
                x
            )
        return x.as_strided((self.elements,), (1,))

    def kept(self, x: Tensor) -> Tensor:
        """This part of flat(x): (count,), or of the parameter's shape if that stays whole."""
        return self.piece(self.flat(x)[self.begin : self.begin + self.count])

    def piece(self, elements: Tensor) -> Tensor:
        """The elements that are kept in the form in which they are updated."""
        return self.formed(elements) if self.whole and self.held else elements

    def formed(self, elements: Tensor) -> Tensor:
        """A tensor of the parameter's form over all elements, which are in one piece of memory."""
        return elements.as_strided(self.shape, self.strides, elements.storage_offset())

    def divides(self, value: Any) -> bool:
        """Whether this rank's piece of state has a value for each element it keeps."""
        return not self.whole and isinstance(value, Tensor) and value.shape == (self.count,)

    def shorten(self, state: Mapping[Any, Any], name: str) -> dict[Any, Any] | None:
        """This rank's piece of a parameter's full state; None: it keeps no element.

        Raises ValueError, with the name, for state that has neither the parameter's shape nor one
        element.
        """
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != self.shape:
                raise ValueError(
                    f"state {key!r} of {name} has shape {tuple(value.shape)}, the parameter "
                    f"{self.shape}: it can't be divided over the ranks"
                )
        if not self.held:
            return None
        return {key: self._shortened(value) for key, value in state.items()}

    def _shortened(self, value: Any) -> Any:
        """A new tensor, so that later steps change nothing in the state that was loaded."""
        if not isinstance(value, Tensor):
            return value
        return (value if self.whole or value.shape != self.shape else self.kept(value)).clone()


def _is_dense(x: Tensor) -> bool:
    """Whether its elements fill one piece of memory, each in a separate place."""
    expected = 1
    for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != expected and x.numel():
            return False
        expected *= n
    return True


def layout_of(parts: Sequence[Part]) -> dict[str, Any]:
    """What a part's state_dict tells of it: numbers only, so that any format can hold it."""
    return {
        "part": parts[0].part if parts else 0,
        "parts": parts[0].parts if parts else 1,
        "shapes": [list(p.shape) for p in parts],
        "strides": [list(p.strides) for p in parts],
    }


def merge_sharded_state_dicts(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The full state of a sharded optimizer, from the parts that all of its ranks have saved.

    state_dicts: what sharded_state_dict() gave on each rank, in any order. No communication: one
    process can do it, after the job. Returns what state_dict() would have returned there, for
    load_state_dict() of a plain optimizer, or of one with shard_state=True at any number of ranks;
    its tensors are new where they were divided. Raises ValueError if a part is missing, is there
    twice, or belongs to another model.

    Examples:
        >>> parameters = list(torch.nn.Linear(3, 2).parameters())
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.Adam(parameters), shard_state=True)
        >>> part = optimizer.sharded_state_dict()  # saved by each rank, in a file of its own
        >>> sorted(hvd.merge_sharded_state_dicts([part]))
        ['param_groups', 'state']
    """
    given = list(state_dicts)
    for place, one in enumerate(given):
        if not isinstance(one, Mapping) or LAYOUT not in one:
            raise ValueError(
                f"state_dicts[{place}] is not a part: pass what sharded_state_dict() returned on "
                "each rank"
            )
    ordered = sorted(given, key=lambda one: one[LAYOUT]["part"])
    count = ordered[0][LAYOUT]["parts"] if ordered else 1
    found = [one[LAYOUT]["part"] for one in ordered]
    if found != list(range(count)) or any(one[LAYOUT]["parts"] != count for one in ordered):
        raise ValueError(f"state_dicts holds the parts {found}: pass each of {count} once")
    first = ordered[0]
    for one in ordered:
        for key in ("shapes", "strides"):
            if [*map(list, one[LAYOUT][key])] != [*map(list, first[LAYOUT][key])]:
                raise ValueError(
                    f"parts 0 and {one[LAYOUT]['part']} have different {key}: they are of "
                    "different models"
                )
    forms = zip(first[LAYOUT]["shapes"], first[LAYOUT]["strides"], strict=True)
    state = {k: v for k, v in first["state"].items() if not isinstance(k, int)}
    for number, (shape, strides) in enumerate(forms):
        parts = [Part(tuple(shape), tuple(strides), i, count) for i in range(count)]
        pieces = [one["state"].get(number) for one in ordered]
        if pieces[0] is not None:
            state[number] = _joined(number, parts, pieces)
    return {**{k: v for k, v in first.items() if k != LAYOUT}, "state": state}


def _joined(number: int, parts: Sequence[Part], pieces: Sequence[Any]) -> dict[Any, Any]:
    """One parameter's full state from all ranks' pieces."""
    joined: dict[Any, Any] = {}
    for key, value in pieces[0].items():
        if not parts[0].divides(value):
            joined[key] = value
            continue
        values = [None if piece is None else piece.get(key) for piece in pieces]
        for part, own in zip(parts, values, strict=True):
            if not part.divides(own):
                raise ValueError(
                    f"part {part.part} lacks {key!r} of parameter {number}, which part 0 has: they "
                    "were not saved after the same step"
                )
        joined[key] = parts[0].formed(torch.cat(values))  # type: ignore[arg-type]
    return joined


def check_alike(
    told: Sequence[Sequence[str]], ranks: Sequence[int], scope: str, words: str, remedy: str = ""
) -> None:
    """Raises MismatchError if one of the ranks has told other words than the first, in order."""
    for theirs, rank in zip(told, ranks, strict=True):
        for one, other in zip(told[0], theirs, strict=False):
            if one != other:
                raise MismatchError(
                    f"{scope}: ranks {ranks[0]} and {rank} {words}: {one}, and {other}{remedy}"
                )
