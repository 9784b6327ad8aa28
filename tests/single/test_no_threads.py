# SPDX-License-Identifier: Apache-2.0
"""No thread is left, for a moment. Work that wants a thread is done without it, or is refused and
can be asked for again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.futures import Future

from farandole import commits
from farandole.c10d.work import Futures, GroupWork
from farandole.commits import Saved
from farandole.launch.disk import JobFolder
from farandole.membership.messages import Commit
from farandole.membership.scheduler import NotReady
from farandole.start.owners import start_owner
from farandole.trust import Folder
from harness.process import PATIENCE


@contextmanager
def no_thread_left() -> Iterator[None]:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield


@pytest.mark.parametrize("starts", [True, False])
def test_either_the_thread_or_its_starter_has_the_resources(
    starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while start() waits, before or after the thread has taken them."""
    real, happened, threads = threading.Thread.start, list[str](), list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        threads.append(thread)
        if starts:
            real(thread)
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        start_owner("x", lambda: happened.append("run"), lambda: happened.append("release"))
    if not starts:
        real(threads[0])  # the thread was about to start
        threads[0].join()
    assert happened == ["run" if starts else "release"]


class Handle:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.numbers: Any = (1,)
        self.ended = threading.Event()

    def poll(self) -> bool:
        return self.ended.is_set()

    def wait(self, _: float | None = None) -> None:
        assert self.ended.wait(PATIENCE)
        self.numbers = None


def work_of(futures: Futures, value: float) -> tuple[Handle, Any]:
    handle: Any = Handle()
    return handle, GroupWork(handle, [torch.full((1,), value)], futures, [], (0, value), [0])


def value_of(future: Future[Any]) -> float:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE)
    return float(future.value()[0])


def test_a_future_is_asked_for_again() -> None:
    futures = Futures()
    handle, work = work_of(futures, 3.0)
    with no_thread_left(), pytest.raises(RuntimeError, match="can't start new thread"):
        work.get_future()
    handle.ended.set()
    assert value_of(work.get_future()) == 3.0
    other, later = work_of(futures, 4.0)
    future = later.get_future()  # needs the group's thread
    other.ended.set()
    assert value_of(future) == 4.0
    futures.close()


def test_one_thread_completes_all_futures() -> None:
    futures = Futures()
    (first, a), (second, b) = work_of(futures, 1.0), work_of(futures, 2.0)
    came, go_on = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        came.set()
        assert go_on.wait(PATIENCE)

    one = a.get_future()
    one.add_done_callback(callback)
    other = b.get_future()  # while the first one's callback runs, another thread would serve it
    with no_thread_left():
        first.ended.set()
        assert came.wait(PATIENCE)
    second.ended.set()
    go_on.set()
    assert (value_of(one), value_of(other)) == (1.0, 2.0)
    futures.close()


def test_a_commit_is_written_at_once(tmp_path: Path) -> None:
    writer = commits.Writer(tmp_path / "kept" / "call-1")
    for number in (1, 2):
        with no_thread_left():
            writer.begin(Saved({"x": number}), Commit(1, number))
            found = commits.read_commit(tmp_path / "kept" / "call-1", Saved({}))
        assert found is not None
        assert found.values == {"x": number}
    writer.begin(Saved({"x": 3}), Commit(1, 3))
    writer.join()
    found = commits.read_commit(tmp_path / "kept" / "call-1", Saved({}))
    assert found is not None
    assert found.values == {"x": 3}


def test_the_supervisor_asks_the_disk_again(tmp_path: Path) -> None:
    commits.Writer(tmp_path / "call-1").write(Saved({"x": 1}), Commit(1, 7))
    said, answered = list[str](), threading.Event()
    folder = JobFolder(Folder(tmp_path), "a", said.append, answered.set)
    ask: Callable[[], Commit] = folder.newest_commit
    with no_thread_left(), pytest.raises(NotReady, match="can't start new thread"):
        ask()
    assert "can't start new thread; farandole tries again" in said[0]
    with suppress(NotReady):  # the disk has not answered yet
        assert ask() == Commit(1, 7)
        return
    assert answered.wait(PATIENCE)
    assert ask() == Commit(1, 7)
