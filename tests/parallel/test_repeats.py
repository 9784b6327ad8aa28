# SPDX-License-Identifier: Apache-2.0
"""Calls that come again take a short way: whatever changes meanwhile, they give the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd
from farandole.calls import repeats

pytestmark = pytest.mark.ranks(1, 2, 3)

TURNS = 4


def mine(turn: int = 0) -> float:
    return 1.0 + fd.rank() + 10 * turn


def total(turn: int = 0) -> float:
    return sum(1.0 + rank + 10 * turn for rank in range(fd.size()))


CALLS: dict[str, Callable[..., Any]] = {
    "neutral in place": lambda x, name: fd.allreduce_async_(x, op=fd.Sum, name=name),
    "neutral": lambda x, name: fd.allreduce_async(x, op=fd.Sum, name=name),
    "torch in place": lambda x, name: hvd.allreduce_async_(x, op=fd.Sum, name=name),
    "neutral, unnamed": lambda x, _: fd.allreduce_async(x, op=fd.Sum),
    "torch, unnamed": lambda x, _: hvd.allreduce_async(x, op=fd.Sum),
    "torch": lambda x, name: hvd.allreduce_async(x, None, name, fd.Sum),
}


@pytest.mark.parametrize("call", CALLS)
def test_forms_that_change_under_one_name(call: str) -> None:
    start = CALLS[call]
    forms: list[Callable[[float], Any]] = [
        lambda v: torch.full((3,), v),
        lambda v: torch.full((3,), v, dtype=torch.float64),
        lambda v: torch.full((3, 2), v),
        lambda v: torch.full((0, 2), v),
        lambda v: torch.tensor(v),
        lambda v: torch.full((2,), v, requires_grad=True),
    ]
    if call.startswith("neutral"):
        forms += [
            lambda v: np.full(3, v, np.float32),
            lambda v: np.full((2, 2), v),
            lambda v: np.full(3, v)[::-1].copy(),
        ]
    if not call.endswith("in place"):
        forms.append(lambda v: torch.full((2, 3), v).t())
    for form in forms:
        for turn in range(TURNS):
            x = form(mine(turn))
            result = start(x, "changing").wait()
            assert result.shape == x.shape
            assert result.dtype == x.dtype
            values = result.detach().numpy() if torch.is_tensor(result) else result
            assert (values == total(turn)).all()
            assert (result is x) == call.endswith("in place")


def test_they_are_known_and_forgotten() -> None:
    def seen() -> int:
        return len(repeats._repeats)

    repeats.clear()
    for turn in range(TURNS):
        fd.allreduce_(np.full(3, mine(turn)), name="known")
    assert seen() == 1
    fd.allreduce_(np.ones(3), name="known", op=fd.Max)  # the last one of a name counts
    assert seen() == 1
    fd.allgather(np.ones(3), name="known to be longer")
    assert seen() == 1
    for _ in range(TURNS):
        for elements in (3, 5):
            fd.allreduce_(np.ones(elements))
    assert seen() == 3
    fd.shutdown()
    assert seen() == 0
    fd.init()
    for turn in range(TURNS):
        assert fd.allreduce(np.full(3, mine(turn)), op=fd.Sum, name="known")[0] == total(turn)


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats.clear()
    monkeypatch.setattr(repeats, "_MOST", 5)
    for turn in range(TURNS):
        for i in range(7):
            x = np.full(3, mine(turn))
            assert fd.allreduce(x, op=fd.Sum, name=f"many {i}").tolist() == [total(turn)] * 3
    assert len(repeats._repeats) == 5


def test_what_cannot_be_changed_in_place() -> None:
    for _ in range(TURNS):
        fd.allreduce_(np.ones(4), name="frozen")
    frozen = np.ones(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fd.allreduce_(frozen, name="frozen")
    with pytest.raises(ValueError, match="contiguous"):
        fd.allreduce_(np.ones(8)[::2], name="frozen")
    for _ in range(2):
        hvd.allreduce_(torch.ones(2, 2), name="strided")
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce_(torch.ones(2, 2).t(), name="strided")


@pytest.mark.ranks(2, 3)
def test_errors_and_after() -> None:
    for turn in range(TURNS):
        x = np.full(3 + (turn == 2 and fd.rank() == 0), mine(turn))
        handle = fd.allreduce_async_(x, op=fd.Sum, name="sometimes")
        if turn == 2:
            with pytest.raises(fd.MismatchError, match="sometimes"):
                handle.wait()
            with pytest.raises(fd.MismatchError, match="sometimes"):
                handle.wait()
        else:
            assert handle.wait().tolist() == [total(turn)] * 3


@pytest.mark.ranks(2, 3)
def test_a_name_in_flight() -> None:
    for _ in range(2):
        fd.allreduce_(np.ones(3), name="busy")
    fd.barrier()
    if fd.rank() == 0:
        handle = fd.allreduce_async_(np.ones(3), op=fd.Average, name="busy")
        with pytest.raises(ValueError, match="busy"):
            fd.allreduce_async_(np.ones(3), op=fd.Average, name="busy")
    fd.barrier()
    if fd.rank() != 0:
        handle = fd.allreduce_async_(np.ones(3), op=fd.Average, name="busy")
    assert handle.wait().tolist() == [1.0] * 3


@pytest.mark.ranks(2, 3)
def test_a_process_set_that_comes_again() -> None:
    process_set = fd.ProcessSet([0])
    for _ in range(2):
        fd.add_process_set(process_set)
        for turn in range(TURNS):
            if process_set.included():
                x = np.full(3, mine(turn))
                fd.allreduce_(x, name="in a set", process_set=process_set)
                assert x.tolist() == [mine(turn)] * 3
        fd.barrier()
        assert fd.remove_process_set(process_set)
        with pytest.raises(ValueError, match="not registered"):
            fd.allreduce_(np.ones(3), name="in a set", process_set=process_set)


def test_handles() -> None:
    """What a handle can do, also one of a call that came again."""
    for turn in range(TURNS):
        x = np.full(3, mine(turn))
        handle = fd.allreduce_async_(x, op=fd.Sum, name="held")
        assert "held" in repr(handle)
        assert handle.wait(timeout=60) is x
        assert handle.poll()
        assert handle.wait() is x
        assert "done" in repr(handle)
        mapped = fd.allreduce_async_(x, op=fd.Max, name="mapped").map(lambda a: a.tolist())
        assert mapped.wait() == mapped.result == [total(turn)] * 3
        fd.allreduce_async_(x, name="dropped")  # keeps its memory until it is done


def test_unnamed_groups_still_meet() -> None:
    """Their names count the unnamed calls before them, of either way."""
    for turn in range(TURNS):
        for _ in range(1 + turn):
            fd.allreduce_(np.full(3, mine(turn)), op=fd.Sum)
        both = fd.grouped_allreduce([np.full(2, mine(turn)), np.full(3, mine())], op=fd.Sum)
        assert [x.tolist() for x in both] == [[total(turn)] * 2, [total()] * 3]


@pytest.mark.ranks(2)
def test_a_second_thread() -> None:
    for _ in range(2):
        fd.allreduce_(np.ones(3))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="give it a name"):
        pool.submit(fd.allreduce_, np.ones(3)).result()
    fd.allreduce_(np.ones(3))


@pytest.mark.parametrize("name", [None, "sent"])
@pytest.mark.parametrize("root", [0, -1])
def test_broadcasts(root: int, name: str | None) -> None:
    root %= fd.size()
    for turn in range(TURNS):
        x = torch.full((3,), mine(turn))
        wanted = [1.0 + root + 10 * turn] * 3
        assert hvd.broadcast_async(x, root, name).wait().tolist() == wanted
        assert x.tolist() == [mine(turn)] * 3
        fd.broadcast_(x, root, name=name)
        assert x.tolist() == wanted
