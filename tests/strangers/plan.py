# SPDX-License-Identifier: Apache-2.0
"""Makes each rank's script of a program: every call meets its peers, and nobody waits in vain.

All scripts follow one global order in which a call is submitted by all before anybody waits for it
without limit; so whatever ranks do between, a runtime that keeps its promises ends every script.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strangers.program import IN_PLACE, MOST_RANKS, Program, Tensor

__all__ = ["Call", "Plan", "plan"]

_LOST = ("drop", "forget", "raise", "timeout_drop", "blocking_timeout")
_FAILS = "fails"  # the fate of a call that all ranks must refuse


@dataclass(frozen=True)
class Call:
    """One call as all ranks know it."""

    number: int
    tensor: Tensor
    salt: int
    members: tuple[int, ...]  # of its set
    active: tuple[int, ...]  # those that have not joined
    name: str | None
    odd: tuple[int, str] | None = None  # the rank that does something wrong, and what


@dataclass
class Plan:
    """`scripts[rank]` is a list of instructions: tuples of a word and its arguments."""

    scripts: list[list[tuple[Any, ...]]]
    calls: dict[int, Call]
    tensors: list[Tensor]
    sets: list[tuple[int, ...]]  # that the script registers


@dataclass
class _Use:
    """How a tensor's last calls stand, by rank."""

    later: dict[int, int] = field(default_factory=dict)  # rank -> call that it will wait for
    lost: set[int] = field(default_factory=set)  # ranks whose call nobody can wait for
    generation: int = 0  # of its name: who has lost a handle cannot know when the name is free
    made: set[int] = field(default_factory=set)  # ranks that have called it


class _Planner:
    def __init__(self, program: Program, ranks: int) -> None:
        self.ranks = ranks
        self.tensors = [_sound(t) for t in program.tensors]
        self.sets = _sound_sets(program.sets, ranks)
        self.scripts: list[list[tuple[Any, ...]]] = [[] for _ in range(ranks)]
        self.calls: dict[int, Call] = {}
        self.uses = [_Use() for _ in self.tensors]
        self.joined: dict[int, list[int]] = {}  # group -> ranks that are in its join()

    # ---- who is there

    def members(self, group: int) -> tuple[int, ...]:
        return self.sets[group - 1] if group and self.sets else tuple(range(self.ranks))

    def group(self, wanted: int) -> int:
        return 1 + (wanted - 1) % len(self.sets) if wanted and self.sets else 0

    def blocked(self) -> set[int]:
        return {rank for ranks in self.joined.values() for rank in ranks}

    def tell(self, ranks: Any, *instruction: Any) -> None:
        for rank in ranks:
            self.scripts[rank].append(instruction)

    def free(self) -> list[int]:
        blocked = self.blocked()
        return [rank for rank in range(self.ranks) if rank not in blocked]

    # ---- moves

    def call(self, tensor: int, fates: list[str]) -> None:
        self._call(tensor % len(self.tensors), fates, None)

    def again(self, tensor: int, times: int, fates: list[str], late: int, other: int) -> None:
        """A step that comes again, until something happens in the last one."""
        for _ in range(times):
            self.call(tensor, ["wait"])
        if late >= 0:
            self.late(late)
        self.call(tensor, fates)
        if other:
            self.memory(tensor, -1, other, keep=True)

    def mismatch(self, tensor: int, rank: int, what: str) -> None:
        """One rank's call differs: an error on all."""
        self._odd(tensor, rank, what)

    def refuse(self, tensor: int, rank: int, what: str) -> None:
        """One rank's argument is wrong: an error on all."""
        self._odd(tensor, rank, what)

    def _odd(self, tensor: int, rank: int, what: str) -> None:
        tensor %= len(self.tensors)
        group = self.group(self.tensors[tensor].group)
        members = self.members(group)
        if len(members) < 2 or self.blocked():
            return
        self._call(tensor, [_FAILS] * MOST_RANKS, (members[rank % len(members)], what))

    def _call(self, index: int, fates: list[str], odd: tuple[int, str] | None) -> None:
        t, use = self.tensors[index], self.uses[index]
        group = self.group(t.group)
        members = self.members(group)
        active = tuple(r for r in members if r not in self.joined.get(group, ()))
        blocked = self.blocked()
        if not active or any(rank in blocked for rank in active):
            return
        number = len(self.calls)
        name = None
        if t.named:
            for rank in active:
                if rank in use.later:
                    self.tell([rank], "wait", use.later.pop(rank))
            if use.lost & set(active):
                use.generation += 1
                use.lost.clear()
                use.later.clear()
            name = f"tensor {index}.{use.generation}"
        call = Call(number, t, number, members, active, name, odd)
        self.calls[number] = call
        for rank in active:
            fate = fates[rank % len(fates)]
            again = t.keep and rank in use.made and rank not in use.lost | set(use.later)
            self.tell([rank], "call", number, index, group, fate, again)
            use.made.add(rank)
            if fate == "later":
                use.later[rank] = number
                if not t.named:
                    use.lost.add(rank)  # its arrays are in flight, and another may be
            elif fate in _LOST:
                use.lost.add(rank)

    def memory(self, tensor: int, rank: int, count: int, keep: bool) -> None:
        """Other memory of the same size comes, and goes or stays."""
        free = self.free()
        ranks = free if rank < 0 else [r for r in free if r == rank % self.ranks]
        self.tell(ranks, "memory", tensor % len(self.tensors), count, keep)

    def late(self, rank: int) -> None:
        """This rank comes when all others can go on no further."""
        self.tell([r for r in self.free() if r == rank % self.ranks], "late")

    def collect(self) -> None:
        self.tell(self.free(), "collect")

    def settle(self) -> None:
        """All waits that are outstanding."""
        free = self.free()
        for use in self.uses:
            for rank in [rank for rank in use.later if rank in free]:
                self.tell([rank], "wait", use.later.pop(rank))

    def quiet(self) -> None:
        """Until nothing is under way, as each rank's metrics say; then names are free again."""
        if self.blocked():
            return
        self.settle()
        self.tell(range(self.ranks), "quiet")
        for use in self.uses:
            use.lost.clear()

    def barrier(self, group: int) -> None:
        group = self.group(group)
        members = self.members(group)
        if not self.blocked() & set(members):
            self.tell(members, "barrier", group)

    def join(self, group: int, rank: int) -> None:
        """A rank is out of data, until all are."""
        group = self.group(group)
        members = self.members(group)
        rank = members[rank % len(members)]
        if rank not in self.blocked():
            self._join(group, rank)

    def _join(self, group: int, rank: int) -> None:
        self.tell([rank], "join", group)
        ranks = self.joined.setdefault(group, [])
        ranks.append(rank)
        if len(ranks) == len(self.members(group)):
            del self.joined[group]

    def end_joins(self) -> None:
        """Whoever is left joins, too: of a set that has begun to."""
        while self.joined:
            group, joined = next(iter(self.joined.items()))
            for rank in self.members(group):
                if rank not in joined:
                    self._join(group, rank)

    def sets_again(self) -> None:
        """Removes all process sets and adds them again."""
        if self.sets and not self.blocked():
            self.quiet()
            self.tell(range(self.ranks), "sets_again")

    def restart(self) -> None:
        """shutdown() and init() with handles outstanding, dropped or not."""
        if self.blocked():
            return
        self.quiet()
        self.tell(range(self.ranks), "restart")

    def freed_storage(self, tensor: int, rank: int) -> None:
        """A torch tensor whose storage is gone: an error on all."""
        t = self.tensors[tensor % len(self.tensors)]
        members = self.members(self.group(t.group))
        torchs = t.kinds[members[rank % len(members)]] != "numpy"
        if torchs and t.memory == "own" and 0 not in t.shape and t.op != "alltoall":
            self._odd(tensor, rank, "freed_storage")


def _sound(t: Tensor) -> Tensor:
    """The same tensor with what goes together."""
    changes: dict[str, Any] = {"kinds": tuple(t.kinds), "shape": tuple(t.shape)}
    if t.op not in IN_PLACE:
        changes["in_place"] = False
    if t.op in ("alltoall", "broadcast"):
        changes["count"] = 1
    if t.dtype == "bfloat16":
        changes["kinds"] = tuple("torch" if k == "numpy" else k for k in t.kinds)
    if t.memory == "strided" and t.in_place:
        changes["memory"] = "own"
    return Tensor(**{**t.__dict__, **changes})


def _sound_sets(wanted: Any, ranks: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for members in wanted:
        one = tuple(sorted({rank % ranks for rank in members}))
        if one and len(one) < ranks and one not in found:
            found.append(one)
    return found


def plan(program: Program, ranks: int) -> Plan:
    """The scripts; the same for the same program."""
    planner = _Planner(program, ranks)
    for word, *arguments in program.moves:
        if word == "join" and planner.joined and planner.group(arguments[0]) not in planner.joined:
            continue  # two joins at once may wait for each other
        getattr(planner, word)(*arguments)
    planner.end_joins()
    planner.quiet()
    return Plan(planner.scripts, planner.calls, planner.tensors, planner.sets)
