# SPDX-License-Identifier: Apache-2.0
"""`farandole run --elastic` when ranks are stopped or hang, and when their launcher is killed: the
job ends all the same, nothing of it lives on beside the next attempt, and training goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.proc import processes_of_sessions
from harness.supervised import SupervisedJob, check, story, supervised_job, training

# A rank that does not come is missed soon, and a rank that has a word to say soon says it.
LIMITS = {"FARANDOLE_STALL_WARN": "1", "FARANDOLE_STALL_ABORT": "3", "FARANDOLE_INIT_TIMEOUT": "15"}
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
LOOPS = "exec('while True: pass')"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """start(source, ranks, *options): that program under the supervisor, with LIMITS."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def start_(source: str, ranks: int, *options: str) -> SupervisedJob:
            path = tmp_path / "program.py"
            path.write_text(source)
            words = ("-np", str(ranks), *options)
            job = supervised_job(words, [sys.executable, str(path)], LIMITS)
            return stack.enter_context(job)

        yield start_


def hangs(victims: set[int], how: str, step: int = 5) -> str:
    """A training in which these ranks hang once, after that step's commit."""
    return training(
        f"if fd.rank() in {victims} and state.steps == {step} and first(str(fd.rank())): {how}"
    )


@pytest.mark.parametrize(
    ("ranks", "victims", "how"),
    [(2, {1}, STOPS), (2, {1}, LOOPS), (2, {0}, LOOPS), (4, {1, 3}, STOPS)],
    ids=["1 of 2 stopped", "1 of 2 loops", "rank 0 loops", "2 of 4 stopped"],
)
def test_ranks_that_hang(start, ranks: int, victims: set[int], how: str) -> None:
    """The others wait for them in a collective."""
    out = start(hangs(victims, how), ranks).finish().check().out
    assert "start 2:" in out
    assert story(out)[-1] == "the job has finished after 1 restart"
    check(out, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_stopped(start, ranks: int) -> None:
    """Nobody is left to say so."""
    out = start(hangs(set(range(ranks)), STOPS), ranks).finish().check().out
    assert re.search(r"rank \d has been stopped for 3 s", out)
    check(out, ranks)


@pytest.mark.parametrize("how", [STOPS, LOOPS], ids=["stopped", "loops"])
def test_a_rank_that_hangs_in_a_restart(start, how: str) -> None:
    """All have left the world; one does not come to init()."""
    event = "if state.steps == 5 and first(str(fd.rank())): raise fd.LibraryError('a broken cable')"
    hang = f"\nif fd.rank() == 1: runtime.init = lambda *_: exec('while True: ' + {how!r})\n"
    source = training(event).replace(
        "\nmain()", "\nfrom farandole import runtime" + hang + "main()"
    )
    source = source.replace(
        "if fd.rank() == 1:", "if fd.rank() == 1 and not (FOLDER / '1').exists():"
    )
    out = start(source, 2).finish().check().out
    assert "start 2:" in out
    check(out, 2)


PRINTS = """
    if state.steps == 9 and not (FOLDER / "gone").exists():
        print(f"holds as {os.getpid()}, its launcher is {os.getppid()}", flush=True)
        WAITS
"""
WAITS = {
    "in a collective": "while True: state.check_host_updates()",
    "in a print": "while True: print('talks')",
    "stopped": STOPS,
    "in a loop": LOOPS,
}


@pytest.mark.parametrize("how", WAITS)
def test_a_launcher_that_is_killed(start, tmp_path: Path, how: str) -> None:
    """A broken start; its ranks are gone when the next one begins."""
    job = start(training(PRINTS.replace("WAITS", WAITS[how])), 2)
    found: dict[int, int] = {}
    for line in job.process.lines():
        if match := re.search(r"holds as (\d+), its launcher is (\d+)", line):
            found[int(match[1])] = int(match[2])
        if len(found) == 2:
            break
    (tmp_path / "gone").touch()
    (launcher,) = set(found.values())
    os.kill(launcher, signal.SIGKILL)
    job.process.wait_for_output("start 2:")
    alive = {process.pid for process in processes_of_sessions({job.process.pid})} & found.keys()
    assert not alive, "they run beside the next attempt"
    out = job.finish().check().out
    assert "the launcher was killed" in out
    check(out, 2)
