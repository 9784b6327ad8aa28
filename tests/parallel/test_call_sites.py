# SPDX-License-Identifier: Apache-2.0
"""Calls without a name that match from different lines: who is told, what of, and who is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import farandole as fd
import farandole.torch as hvd
from farandole.observe import flight
from farandole.observe.explain import explain
from harness.ranks import last, restarted

pytestmark = pytest.mark.ranks(2, 4)
Calls = list[Callable[[], Any]]
FILE = f"{__name__.replace('.', '/')}.py"


def findings() -> list[str]:
    """What this rank was told of since its world began."""
    page = flight.own_page()
    return list(page.get("findings", "").splitlines())


def recorded() -> list[dict[str, Any]]:
    """This rank's calls, as they are recorded."""
    return [event for event in flight.own_page(4096)["events"] if event["kind"] == "submit"]


def line(function: Callable[..., Any]) -> str:
    """The line of a function that is written in one."""
    return f"{FILE}:{function.__code__.co_firstlineno}"


def swapped(calls: Calls) -> None:
    """Makes two calls, the last rank in the other order."""
    for call in reversed(calls) if fd.rank() == last() else calls:
        call()


# Of arrays x, or tensors a.
PAIRS = {
    "allreduce": "fd.allreduce(x, op=fd.Sum)",
    "a small one": "fd.allreduce(x[:2], op=fd.Sum)",
    "allreduce_": "fd.allreduce_(x.copy())",
    "a group": "fd.grouped_allreduce([x, -x])",
    "allgather": "fd.allgather(x)",
    "torch": "hvd.allreduce(a)",
    "torch, in place": "hvd.allreduce_(a.clone())",
    "reducescatter": "hvd.reducescatter(a)",
    "alltoall": "hvd.alltoall(a)",
}


def pairs() -> dict[str, Calls]:
    """Two calls of equal form each, on two lines."""
    made = {}
    for kind, call in PAIRS.items():
        names: dict[str, Any] = {**globals()}
        names["x"] = np.full(3000, fd.rank() + 1.0)
        names["a"] = torch.from_numpy(names["x"])
        text = "\n" * 2 * len(made) + f"one = lambda: {call}\ntwo = lambda: {call}\n"
        exec(compile(text, FILE, "exec"), names)
        made[kind] = [names["one"], names["two"]]
    return made


def told_by(calls: Callable[[], object]) -> list[str]:
    """What this rank is told of while it makes calls."""
    before = findings()
    calls()
    return findings()[len(before) :]


def test_swapped_calls_are_told_of_once() -> None:
    others = "rank 0" if last() == 1 else f"ranks 0-{last() - 1}"
    for kind, calls in pairs().items():
        # The calls are remembered from the second time on.
        told = told_by(lambda calls=calls: [swapped(calls) for _ in range(3)])  # type: ignore[misc]
        assert len(told) == 1, kind
        first, second = (line(call) for call in calls)
        assert f"{first} on {others}, {second} on rank {last()}" in told[0], kind
    pages = flight.pages(-1, 0)
    assert all(page["findings"] == pages[0]["findings"] for page in pages)
    lines = explain(flight.pages(-1, 4096))
    assert any("matches calls from different lines" in text for text in lines), lines


@restarted(FARANDOLE_CALL_SITES="check")
def test_swapped_calls_can_be_an_error() -> None:
    for kind, calls in pairs().items():
        first, second = map(line, calls)
        for call in reversed(calls) if fd.rank() == last() else calls:
            with pytest.raises(fd.MismatchError) as raised:
                call()
            assert first in str(raised.value), kind
            assert second in str(raised.value), kind
        for call in calls:
            call()
    assert findings() == []


@restarted(FARANDOLE_CALL_SITES="off")
def test_nothing_is_looked_at() -> None:
    assert told_by(lambda: [swapped(calls) for calls in pairs().values()]) == []
    assert not any("site" in call for call in recorded())


def test_what_all_ranks_do_alike() -> None:
    x = np.full(3000, fd.rank() + 1.0)

    def helper(values: np.ndarray[Any, Any]) -> Any:
        return fd.allreduce(values, op=fd.Sum)

    def calls() -> None:
        for _ in range(5):
            fd.allreduce(x)
        _ = [fd.allreduce(x) for _ in range(3)]
        _ = list(map(fd.allreduce, [x, x]))
        (fd.allreduce(x), fd.allgather(
            x
        ))  # fmt: skip
        if fd.rank() == last():
            helper(x)
        else:
            helper(x)
        fd.allgather_object({"rank": fd.rank()})
        thread = threading.Thread(target=fd.allreduce, args=(x,), kwargs={"name": "in a thread"})
        thread.start()
        thread.join()

    assert told_by(calls) == []


def test_what_ranks_do_in_different_branches() -> None:
    """Calls that have a root, and barriers, are often made so; named calls match by name."""
    x = np.full(3000, fd.rank() + 1.0)

    def calls() -> None:
        if fd.rank() == 0:
            fd.broadcast(x, 0)
            fd.broadcast_object("an object", 0)
            fd.barrier()
            fd.allreduce(x, name="sum")
            hvd.allreduce(torch.from_numpy(x), name="torch's sum")
        else:
            fd.broadcast(x, 0)
            fd.broadcast_object(None, 0)
            fd.barrier()
            fd.allreduce(x, name="sum")
            hvd.allreduce(torch.from_numpy(x), name="torch's sum")

    assert told_by(calls) == []


def test_a_program_that_lies_elsewhere() -> None:
    """The same file in another folder of each rank is the same line, with its package's folders."""
    for module, file in (("__main__", "train.py"), ("tools.metrics", "tools/metrics.py")):
        program = "import numpy as np\nimport farandole as fd\nfor x in np.ones((3, 2)):\n"
        program += "    fd.allreduce(x)\nfd.barrier()\n"
        code = compile(program, f"/home/rank{fd.rank()}/{file}", "exec")
        assert told_by(lambda code=code, m=module: exec(code, {"__name__": m})) == []  # type: ignore[misc]
        assert [call["site"] for call in recorded()[-4:]] == [f"{file}:4"] * 3 + [f"{file}:5"]


def test_code_that_torch_has_made_is_no_line_of_the_program() -> None:
    before = findings()
    module: dict[str, Any] = {"__name__": "torch._inductor.runtime.compile_tasks.c"}
    made = compile("def run(f):\n    return f()\n", f"/tmp/inductor/{fd.rank()}/c.py", "exec")
    exec(made, module)
    module["run"](partial(fd.allreduce, np.ones(3)))
    assert findings() == before
    assert recorded()[-1]["site"].startswith(f"{FILE}:")


def test_every_call_is_recorded_with_its_line() -> None:
    x = np.full(3000, fd.rank() + 1.0)
    t = torch.from_numpy(x)
    other = fd.rank() ^ 1
    calls: Calls = [
        lambda: fd.allreduce(x),
        lambda: fd.allreduce_(x, name="a name"),
        lambda: fd.allreduce_(x, name="a name"),
        lambda: fd.allreduce(x, op=fd.Adasum, name="adasum"),
        lambda: fd.broadcast(x, 0),
        lambda: fd.barrier(),
        lambda: hvd.broadcast(t, 0),
        lambda: hvd.alltoall(t),
        lambda: fd.broadcast_object("an object", 0),
        lambda: [fd.send_async(x, other), fd.recv(x.copy(), other)],
    ]
    for number in range(2):
        for call in calls:
            before = len(recorded())
            call()
            made = [one for one in recorded()[before:] if "Adasum of" not in one["name"]]
            assert made, (number, line(call))
            assert all(one["site"] == line(call) for one in made), (number, made)


# ---- torch.distributed


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("farandole")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_metrics_that_ranks_log_in_another_order() -> None:
    loss, accuracy = torch.tensor([fd.rank() + 1.0]), torch.tensor([0.5 * fd.rank()])
    calls: Calls = [
        lambda: dist.all_reduce(loss),
        lambda: dist.all_reduce(accuracy),
    ]
    told = told_by(lambda: [swapped(calls) for _ in range(3)])
    assert len(told) == 1
    for call in calls:
        assert line(call) in told[0]


@pytest.mark.usefixtures("group")
def test_what_ranks_do_in_different_branches_of_torch_distributed() -> None:
    x, n = torch.full((4,), fd.rank() + 1.0), fd.size()

    def calls() -> None:
        if fd.rank() == 0:
            dist.gather(x, [torch.zeros(4) for _ in range(n)])
            dist.gather_object("rank 0", [None] * n)
            dist.reduce(x.to(torch.int32), 0, dist.ReduceOp.BOR)
            dist.scatter(x.clone(), [x] * n)
            dist.broadcast_object_list(["rank 0"])
            dist.barrier()
        else:
            dist.gather(x)
            dist.gather_object("another rank")
            dist.reduce(x.to(torch.int32), 0, dist.ReduceOp.BOR)
            dist.scatter(x.clone())
            dist.broadcast_object_list([None])
            dist.barrier()
        for _ in range(3):
            dist.all_reduce(x)

    assert told_by(calls) == []
    assert recorded()[-1]["site"].startswith(FILE)
