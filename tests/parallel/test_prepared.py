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
from farandole.calls import prepared
from farandole.calls.leases import lend
from harness.ranks import mine, total

pytestmark = pytest.mark.ranks(1, 2, 3)

TURNS = 4


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


class Somewhere(torch.Tensor):
    """On the device that it names: a CPU's tensor, since no other device here has addresses."""

    where = torch.device("cpu")
    device = property(lambda self: self.where)
    is_cpu = property(lambda self: self.where.type == "cpu")


@pytest.mark.parametrize("call", CALLS)
def test_what_was_prepared_for_one_device_is_not_used_on_another(call: str) -> None:
    def sent(turn: int, device: str) -> Any:
        x = torch.full((3,), mine(turn)).as_subclass(Somewhere)
        x.where = torch.device(device)
        return CALLS[call](x, "moving").wait()

    for turn in range(TURNS):
        assert (sent(turn, "cpu") == total(turn)).all()
    with pytest.raises(TypeError, match="device meta"):
        sent(TURNS, "meta")
    assert (sent(0, "cpu") == total()).all()


def test_they_are_known_and_forgotten() -> None:
    """Each of them by the call that waits, and by the one that it makes."""

    def seen() -> int:
        return sum(map(len, prepared._all)) // 2

    prepared.clear()
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
    prepared.clear()
    monkeypatch.setattr(prepared, "_MOST", 5)
    for turn in range(TURNS):
        for i in range(7):
            x = np.full(3, mine(turn))
            assert fd.allreduce(x, op=fd.Sum, name=f"many {i}").tolist() == [total(turn)] * 3
    assert max(map(len, prepared._all)) == 5


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


@pytest.mark.parametrize("wrong", [False, 0.0, np.False_])
def test_what_equals_the_root_and_is_no_rank(wrong: Any) -> None:
    calls: list[Callable[[Any, Any], Any]] = [
        lambda x, root: fd.broadcast(x, root, name="root"),
        lambda x, root: fd.broadcast(x, root_rank=root, name="root by its name"),
        lambda x, root: fd.broadcast(x, root_rank=root),
    ]
    for call in calls:
        for root in (0, 0, wrong, 0):
            if root is wrong:
                with pytest.raises(TypeError, match="root_rank is"):
                    call(np.full(3, mine()), root)
            else:
                assert call(np.full(3, mine()), root).tolist() == [1.0] * 3


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_what_equals_an_op_and_is_none(wrong: Any) -> None:
    for op in (fd.Sum, fd.Sum, wrong, 1):
        if op is wrong:
            with pytest.raises(TypeError, match="op is"):
                hvd.allreduce_async(torch.full((3,), mine()), op=op, name="op")
        else:
            x = torch.full((3,), mine())
            assert hvd.allreduce_async(x, op=op, name="op").wait().tolist() == [total()] * 3


@pytest.mark.parametrize("name", [None, "by a factor"])
@pytest.mark.parametrize("factor", [np.array(0.0), torch.tensor(0.0)])
def test_a_factor_that_is_changed_in_place(factor: Any, name: str | None) -> None:
    for turn in range(TURNS):
        factor += 1
        for x in (np.full(3, mine(turn)), torch.full((3,), mine(turn))):
            y = fd.allreduce(x, op=fd.Sum, prescale_factor=factor, name=name)
            assert y.tolist() == [float(factor) * total(turn)] * 3


def test_what_a_signal_handler_raises_is_neither_lost_nor_a_second_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.ones(3)
    for _ in range(2):
        fd.allreduce_async_(x, name="interrupted").wait()
    before = fd.metrics()["tensors_submitted"]

    def interrupted(*args: Any) -> int:
        lend(*args)
        raise TimeoutError("the handler's")

    monkeypatch.setattr(prepared, "lend", interrupted)
    with pytest.raises(TimeoutError, match="the handler's"):
        fd.allreduce_async_(x, name="interrupted")
    assert fd.metrics()["tensors_submitted"] == before + 1
