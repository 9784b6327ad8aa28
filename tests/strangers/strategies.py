# SPDX-License-Identifier: Apache-2.0
"""Draws programs: what users may do, with no regard to how farandole does it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from harness.arrays import DTYPES, OPS
from strangers.loops import Loop
from strangers.program import FATES, MOST_RANKS, OPERATIONS, Program, Tensor

__all__ = ["loops", "programs"]

Strategy = st.SearchStrategy[Any]

SHAPES: list[tuple[int, ...]] = [
    (7,),
    (),
    (1,),
    (0,),
    (3, 5),
    (1000,),
    (20_000,),
    (3, 0),
    (130_000,),
]
_MOVES = 14
_RANKS = st.integers(0, MOST_RANKS - 1)
_FLAGS = st.lists(st.booleans(), min_size=MOST_RANKS, max_size=MOST_RANKS)


def _move(word: str, *arguments: Strategy) -> Strategy:
    return st.tuples(st.just(word), *arguments).map(list)


def _moves(move: Strategy) -> Strategy:
    """Two lists in one: hypothesis keeps a single one short."""
    some = st.lists(move, max_size=_MOVES)
    return st.tuples(some, some).map(lambda both: (*both[0], *both[1]))


def programs() -> Strategy:
    """Of calls. One or two tensors as a rule, so that the same call comes again."""
    tensors = st.lists(_tensors(), min_size=1, max_size=3).map(tuple)
    moves = _moves(_call_moves())
    subset = st.lists(_RANKS, min_size=1, max_size=3).map(tuple)
    sets = st.lists(subset, max_size=2).map(tuple)
    return st.builds(Program, tensors=tensors, moves=moves, sets=sets)


def _tensors() -> Strategy:
    kinds = st.sampled_from(["numpy", "torch", "hvd"])
    several = st.lists(kinds, min_size=MOST_RANKS, max_size=MOST_RANKS)
    one = kinds.map(lambda kind: [kind] * MOST_RANKS)
    return st.builds(
        Tensor,
        op=st.sampled_from([*OPERATIONS[:1] * 3, *OPERATIONS]),
        named=st.sampled_from([True, True, True, False]),
        group=st.sampled_from([0, 0, 0, 1, 2]),
        dtype=st.sampled_from(["float32", "float32", "float64", *DTYPES, "bfloat16"]),
        shape=st.sampled_from(SHAPES),
        reduce=st.sampled_from(["Sum", *OPS]),
        in_place=st.booleans(),
        count=st.sampled_from([1, 1, 1, 1, 2, 3]),
        root=_RANKS,
        kinds=st.one_of(one, several).map(tuple),
        memory=st.sampled_from(["own", "own", "own", "own", "arena", "strided"]),
        keep=st.booleans(),
    )


def _call_moves() -> Strategy:
    tensor = st.sampled_from([0, 0, 1, 2])
    fates = st.lists(st.sampled_from(["wait"] * 6 + list(FATES)), min_size=MOST_RANKS)
    fates = fates.map(lambda found: found[:MOST_RANKS])
    mismatch = st.sampled_from(["dtype", "shape"])
    wrong = st.sampled_from(["none", "text", "list", "longdouble"])
    moves: dict[str, tuple[int, Strategy]] = {
        "call": (8, _move("call", tensor, fates)),
        "again": (
            4,
            _move("again", tensor, st.integers(0, 3), fates, st.integers(-1, 3), st.integers(0, 3)),
        ),
        "memory": (
            2,
            _move("memory", tensor, st.integers(-1, 3), st.integers(1, 3), st.booleans()),
        ),
        "late": (3, _move("late", _RANKS)),
        "collect": (1, _move("collect")),
        "settle": (1, _move("settle")),
        "quiet": (1, _move("quiet")),
        "barrier": (1, _move("barrier", st.integers(0, 2))),
        "join": (1, _move("join", st.sampled_from([0, 0, 1, 2]), _RANKS)),
        "mismatch": (1, _move("mismatch", tensor, _RANKS, mismatch)),
        "refuse": (1, _move("refuse", tensor, _RANKS, wrong)),
        "freed_storage": (1, _move("freed_storage", tensor, _RANKS)),
        "sets": (1, _move("sets_again")),
        "restart": (1, _move("restart")),
    }
    return _weighted(moves)


def _weighted(moves: dict[str, tuple[int, Strategy]]) -> Strategy:
    """Simple moves come first: failures shrink towards them."""
    return st.one_of([move for n, move in moves.values() for _ in range(n)])


def loops() -> Strategy:
    """Of training."""
    return st.builds(
        Loop,
        moves=_moves(_loop_moves()),
        op=st.sampled_from(["Average", "Average", "Sum", "Min"]),
        passes=st.sampled_from([1, 1, 2, 3]),
        views=st.booleans(),
        named=st.booleans(),
        width=st.sampled_from([4, 1500]),
        optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
        kind=st.sampled_from(["plain", "plain", "split", "compressed"]),
        table=st.sampled_from(["", "", "rows", "dense"]),
    )


def _loop_moves() -> Strategy:
    used = st.one_of(st.just([True] * MOST_RANKS), _FLAGS)
    hold = st.sampled_from([False, False, True])
    forms = st.sampled_from(["plain", "plain", "plain", "penalty", "query", "again"])
    zero = ["optimizer_none", "optimizer_zero", "model_none", "model_zero"]
    step = ["plain"] * 3 + ["clip", "closure"]
    after = st.sampled_from(["zero", "go_on", "drop"])
    moves: dict[str, tuple[int, Strategy]] = {
        "backward": (6, _move("backward", used, hold, forms)),
        "step": (3, _move("step", st.sampled_from(step))),
        "zero": (3, _move("zero", st.sampled_from(zero))),
        "raise": (1, _move("raise", after)),
        "rebuild": (1, _move("rebuild", st.booleans())),
        "copy": (1, _move("copy")),
        "late": (1, _move("late", _RANKS)),
        "memory": (1, _move("memory", st.integers(1, 2), st.booleans())),
        "broadcast": (1, _move("broadcast", _RANKS)),
        "edit": (1, _move("edit")),
    }
    return _weighted(moves)
