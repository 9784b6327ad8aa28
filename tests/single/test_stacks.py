# SPDX-License-Identifier: Apache-2.0
"""The stacks that a rank tells its peers, while other threads of Python run."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from farandole.observe import stacks


@contextmanager
def in_thread(body: Callable[[], object], name: str) -> Iterator[None]:
    """A thread that has called `body`, and then waits until the block is left."""
    reached, end = threading.Event(), threading.Event()

    def run() -> None:
        body()
        reached.set()
        end.wait()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    reached.wait()
    yield
    end.set()
    thread.join()


def told(left_out: tuple[str, ...] = ()) -> str:
    """An answer, as a thread gives it."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(stacks._stacks(left_out)), name="own")
    thread.start()
    thread.join()
    return answers[0]


def test_the_main_thread_comes_first_and_the_answering_thread_not_at_all() -> None:
    with in_thread(lambda: None, "loader"):
        answer = told()
    main, *others = answer[1:].split("\n\n")
    assert main.startswith("Main thread (most recent call first):\n  File ")
    assert f'  File "{__file__}", line' in main
    assert "in test_the_main_thread_comes_first" in main
    (other,) = (text for text in others if text.startswith("Thread loader (most recent"))
    assert f'  File "{__file__}", line' in other
    assert "Thread own (" not in answer


def test_the_main_thread_is_alone_beside_threads_that_never_call() -> None:
    before = told()[0]  # threads of other tests may be left
    with in_thread(lambda: None, "calls"):
        assert told()[0] == "0"
    source = compile("def wait(event): event.wait()", "/x/tqdm/_monitor.py", "exec")
    names: dict[str, Callable[[threading.Event], None]] = {}
    exec(source, names)
    end = threading.Event()
    thread = threading.Thread(target=names["wait"], args=(end,))
    thread.start()
    assert told()[0] == before
    end.set()
    thread.join()


def test_frames_of_farandole_are_omitted_above_the_user_s_only() -> None:
    own = threading.__file__  # as if that were a module of farandole
    with in_thread(lambda: None, "loader"):
        (all_of_it,) = (text for text in told().split("\n\n") if text.startswith("Thread loader"))
        (cut,) = (text for text in told((own,)).split("\n\n") if text.startswith("Thread loader"))
    assert own in all_of_it.splitlines()[1]
    assert __file__ in cut.splitlines()[1]
    assert own in cut  # below


def test_a_long_stack_ends_with_dots() -> None:
    def deep(more: int) -> str:
        return deep(more - 1) if more else told()

    main = deep(200)[1:].split("\n\n")[0].splitlines()
    assert len(main) == 102
    assert main[-1] == "  ..."


def test_a_default_timeout_does_not_hold_for_the_core_s_socket() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        ends = stacks._socket_pair()
    finally:
        socket.setdefaulttimeout(before)
    assert all(map(os.get_blocking, ends))
    for end in ends:
        os.close(end)


def test_a_thread_that_cannot_be_shown_ends_no_answers() -> None:
    class Nameless(threading.Thread):
        @property
        def name(self) -> str:  # type: ignore[override]
            raise AttributeError("none")

    core, own = stacks._socket_pair()
    answering = threading.Thread(target=stacks._answer, args=(own, ()))
    answering.start()
    end = threading.Event()
    odd = Nameless(target=end.wait)
    odd.start()
    os.write(core, b"?")
    assert os.read(core, 65536).startswith(b"0Python can't show its stacks: AttributeError")
    end.set()
    odd.join()
    os.write(core, b"?")
    assert b"Main thread (most recent call first):\n  File" in os.read(core, 65536)
    os.close(core)
    answering.join()


def test_stacks_of_threads_that_run() -> None:
    """Their frames come and go while they are read."""
    end = threading.Event()

    def recurse(more: int, *values: int) -> None:
        if more and not end.is_set():
            recurse(more - 1, *range(more))
            recurse(more - 1, *values)

    def work() -> None:
        while not end.is_set():
            recurse(6)

    threads = [threading.Thread(target=work, name=f"worker {n}") for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        answer = told()
        for thread in threads:
            assert f"Thread {thread.name} (most recent call first):\n  File" in answer
    end.set()
    for thread in threads:
        thread.join()
