# SPDX-License-Identifier: Apache-2.0
"""Ranks that shall join an elastic job and do not come: the job tells of it, goes on without them,
and ends well."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from farandole.start import joining, recruits
from harness.mpirun import MpiJob, mpi_job
from harness.process import PATIENCE
from harness.worlds import ULFM, WORLDS, ends

Start = Callable[..., MpiJob]
# What a process that joins does; in step 4 the others wait until the test has seen what it waits
# for. They take in whoever comes meanwhile.
HEAD = """
import os, signal

def stop():
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

def hang(*_):
    print("hangs", flush=True)
    while True:
        signal.pause()

if "FARANDOLE_JOINS" in os.environ:
    {early}
"""
WAITS = """
def dies(place, state):
    while place == "step" and state.steps == 4 and not shall_go():
        state.check_host_updates()

def shall_go():
    seen = np.array([(FOLDER / "go").exists()], np.uint8)
    return fd.allreduce(seen, op=fd.Max, name="go")[0]

{late}
main()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(early, late, **variables): two ranks, and one that shall join and does this."""
    with ExitStack() as stack:

        def start_(early: str = "pass", late: str = "", **env: str) -> MpiJob:
            path = tmp_path / "program.py"
            path.write_text(HEAD.format(early=early) + WORLDS + WAITS.format(late=late))
            variables = {"FARANDOLE_MAX_NP": "3", **env}
            job = mpi_job([sys.executable, str(path)], 2, variables, ULFM)
            return stack.enter_context(job)

        yield start_


def goes_on(job: MpiJob, folder: Path) -> str:
    """Lets the two ranks train to the end, which is good; returns the output."""
    (folder / "go").touch()
    out = job.finish().check().out
    found = ends(out)
    assert sorted(found) == [0, 1], out
    assert {each[0] for each in found.values()} == {2}, out
    return out


@pytest.mark.parametrize(
    ("early", "late"),
    [("stop()", ""), ("pass", "if farandole.elastic.joining.joins(): stop()")],
    ids=["before init", "before training"],
)
def test_a_recruit_that_is_stopped(start: Start, tmp_path: Path, early: str, late: str) -> None:
    """It is told of once, and ended when training ends."""
    job = start(early, late, FARANDOLE_STALL_WARN="0.5")
    job.process.wait_for_output("a process that was to join has not come to")
    job.process.wait_for_output("stops")
    out = goes_on(job, tmp_path)
    assert out.count("training goes on without it. Remedy: ") == 1, out


def test_a_recruit_that_hangs_in_init(start: Start, tmp_path: Path) -> None:
    """As where MPI does not reach the rank that has started it: that one ends it, and others go on
    being started until three have failed."""
    early = "import farandole.start.joining as r; r._Joiner.__init__ = hang"
    job = start(early, FARANDOLE_INIT_TIMEOUT="4")
    job.process.wait_for_output("2 more tries: it did not come within 4 s")
    goes_on(job, tmp_path)


PAUSES = """
import signal
from farandole.start import joining, recruits
with joining.limited({seconds}):
    print("waits", flush=True)
    signal.pause()
"""


def pauses(token: str, seconds: float) -> subprocess.Popen[bytes]:
    """A process that joins, and waits for MPI for ever."""
    program = PAUSES.format(seconds=seconds)
    env = {**os.environ, "FARANDOLE_JOINS": token}
    return subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)


def test_a_recruit_has_a_limit_of_its_own() -> None:
    """On another host than the rank that has started it nobody else ends it."""
    with pauses("of another host", 0.05) as process:
        assert process.wait(PATIENCE) == -signal.SIGALRM


def test_a_recruit_ends_with_the_rank_that_has_started_it() -> None:
    token = joining.new_token()
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(joining.address(token))
        line.listen()
        process = pauses(token, 1000)
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
    with process:
        assert process.wait(PATIENCE) == -signal.SIGIO
    with pauses(token, 1000) as late:
        assert late.wait(PATIENCE) == -signal.SIGIO


def test_a_recruit_that_stops_while_it_is_taken_in(start: Start, tmp_path: Path) -> None:
    """The others wait for half of FARANDOLE_INIT_TIMEOUT, end it, and go on."""
    early = """import farandole.start.joining as r
    hear = r._Joiner._hear
    r._Joiner._hear = lambda *words: (hear(*words), stop())"""
    job = start(early, FARANDOLE_INIT_TIMEOUT="20")
    job.process.wait_for_output("world 2: 2 ranks go on")
    goes_on(job, tmp_path)


def test_a_recruit_that_stops_when_it_is_a_rank(start: Start, tmp_path: Path) -> None:
    """As any rank that is stopped it ends the job, which does not wait for it."""
    early = "import farandole.worlds as w; w.Worlds._enter = lambda *_: stop()"
    job = start(early, FARANDOLE_INIT_TIMEOUT="20")
    result = job.finish()
    assert result.returncode != 0
    assert "rank 2 did not come" in result.out, result.out


def test_who_is_stopped_and_who_is_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert not recruits._stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert recruits._stopped(child.pid)
    child.kill()
    child.wait()
    assert not recruits._stopped(child.pid)  # no such process
