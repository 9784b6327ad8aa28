# SPDX-License-Identifier: Apache-2.0
"""How jobs of `farandole run --elastic` end before their time: by signals to the supervisor, its
agents or ranks, or without these. Nothing is left, and the same command goes on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.launch.agent import MODULE
from harness.proc import processes_of_sessions
from harness.supervised import SupervisedJob, story
from harness.worlds import check, training

Start = Callable[..., SupervisedJob]
DIES = "if fd.rank() == {victim} and state.steps == {step} and first('died'): {end}"
HOLDS = """
    if state.steps == 9 and holds():
        print("holds", flush=True)
        while holds():
            state.check_host_updates()
"""
TAIL = """
def holds():
    seen = np.array([(FOLDER / "go").exists()], np.uint8)
    return not fd.allreduce(seen, op=fd.Max, name="go")[0]
"""


def holding() -> str:
    """A training whose ranks wait after the ninth commit, until there is a file `go`."""
    return training(HOLDS).replace("\nmain()\n", f"{TAIL}\nmain()\n")


def agent_of(job: SupervisedJob) -> int:
    """The agent's process."""
    (pid,) = (
        process.pid
        for process in processes_of_sessions({job.process.pid})
        if process.command.split("\0")[3:4] == [MODULE]
    )
    return pid


def all_of(job: SupervisedJob) -> str:
    """The output when all its processes have ended, which may outlive the supervisor."""
    return "\n".join(job.process.lines())


# ---- signals to ranks and agents


@pytest.mark.parametrize(
    ("number", "ranks", "victim"),
    [(signal.SIGTERM, 1, 0), (signal.SIGUSR1, 2, 1), (signal.SIGTERM, 3, 1)],
)
def test_a_rank_that_is_preempted(
    elastic_ranks: Start, number: int, ranks: int, victim: int
) -> None:
    """It leaves at the next commit, with it on the disk; another one comes in its place."""
    end = f"os.kill(os.getpid(), {int(number)})"
    source = training(DIES.format(victim=victim, step=6, end=end))
    out = elastic_ranks(source, ranks).finish().check().out
    assert f"got {signal.Signals(number).name}: it leaves at the next commit, within 30 s" in out
    assert f"rank {victim} left" in story(out)
    assert re.search(rf"world 2: {ranks} ranks? from commit [78]", out)
    check(out, ranks)


# Twice the time until ranks leave that have no supervisor.
LEASE = {"FARANDOLE_PEER_TIMEOUT": "12"}
HOST_GOES = "is being preempted ({}): its ranks leave within 30 s"
GOES_ON = "continue with --checkpoint-dir {folder}"


@pytest.mark.parametrize(
    ("who", "number", "says"),
    [
        # SIGTERM, too: tests of ranks that do not leave.
        ("agent", signal.SIGUSR1, HOST_GOES.format("SIGUSR1")),  # of the only host
        ("supervisor", signal.SIGUSR1, GOES_ON),
        ("supervisor", signal.SIGHUP, GOES_ON),
        ("supervisor", signal.SIGKILL, "the supervisor does not answer"),
    ],
)
def test_all_ranks_leave_and_the_same_command_goes_on(
    elastic_ranks: Start, tmp_path: Path, who: str, number: int, says: str
) -> None:
    options = ("--checkpoint-dir", str(tmp_path / "kept"))
    job = elastic_ranks(holding(), 2, *options, **LEASE)
    job.process.wait_for_output("holds")
    os.kill(agent_of(job) if who == "agent" else job.process.pid, number)
    result, out = job.finish(), all_of(job)
    if number == signal.SIGKILL:
        assert out.count("errors.LibraryError: the supervisor of this elastic job") == 2, out
    else:
        assert result.returncode == 75, out
        assert "all ranks have left, and their state is on the disk" in out
    assert says.format(folder=tmp_path / "kept") in out
    # A rank whose signal comes late may be in a world alone before it leaves, too.
    assert "world 2: 2 ranks" not in out
    (tmp_path / "go").touch()
    out = elastic_ranks(holding(), 2, *options, **LEASE).finish().check().out
    assert re.search(r"world \d: 2 ranks from commit \d+ on the disk", out)
    assert out.count("reset on") == 2
    check(out, 2)


LATE = """
Call = farandole.elastic._TrainingCall
write = Call.write

def write_and_hear(self, state, at_once=False):
    write(self, state, at_once)
    if fd.rank() == 1 and (FOLDER / "left").exists() and first("late"):
        os.kill(os.getpid(), signal.SIGTERM)

Call.write = write_and_hear
"""


def test_a_signal_that_comes_while_the_commit_is_written(elastic_ranks: Start) -> None:
    """The commit is on the disk: the rank need not be in another world to leave."""
    does = "if fd.rank() == 0 and state.steps == 6 and first('left'): os.kill(os.getpid(), 15)"
    source = training(does).replace("\nmain()\n", f"{LATE}\nmain()\n")
    out = elastic_ranks(source, 2).finish().check().out
    assert out.count("got SIGTERM: it leaves at the next commit") == 2, out
    check(out, 2, world=2)


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("waits")
while True: signal.pause()
"""


def test_ranks_that_do_not_leave_a_host_that_is_taken_away(elastic_ranks: Start) -> None:
    """They take no notice of signals, and the agent ends them when their time is over."""
    job = elastic_ranks(STUBBORN, 1, FARANDOLE_GRACE="1")
    job.process.wait_for_output("waits")
    os.kill(agent_of(job), signal.SIGTERM)
    result = job.finish()
    assert result.returncode == 75, result.out
    assert "a new process was killed by SIGKILL" in story(result.out)


LINGERS = """
import atexit, signal
import farandole.runtime
from farandole.start import agent_client

def lingers():  # when all is said; the answer to the second one comes when the supervisor knows
    for turn in (98, 99):
        agent_client._client.exchange(world, turn, b"", 60.0)
    print("lingers", flush=True)
    signal.pause()

atexit.register(lingers)
"""


def test_a_host_that_is_lost_when_all_have_ended_well(elastic_ranks: Start) -> None:
    """Their last words count, though no agent tells that they have ended."""
    source = training().replace("fd.init()\n", f"{LINGERS}fd.init()\n")
    job = elastic_ranks(source + "world = farandole.runtime.current_bootstrap().world\n", 2)
    job.process.wait_for_output("lingers")
    os.kill(agent_of(job), signal.SIGKILL)
    out = job.finish().check().out
    assert story(out)[-1] == "the job has finished in 1 world"
    check(out, 2)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "the agent has ended with -9"),
        (signal.SIGSTOP, "the agent does not answer: it is killed"),
    ],
)
def test_an_agent_that_is_lost(
    elastic_ranks: Start, tmp_path: Path, number: int, says: str
) -> None:
    """Its ranks are lost with it; those of another agent go on from the disk."""
    limits = {"FARANDOLE_CHECKPOINT_SECONDS": "0", "FARANDOLE_PEER_TIMEOUT": "3"}
    job = elastic_ranks(holding(), 2, **limits)
    job.process.wait_for_output("holds")
    os.kill(agent_of(job), number)
    job.process.wait_for_output(says)
    (tmp_path / "go").touch()
    out = job.finish().check().out
    assert any(line.startswith("rank 0 was lost") for line in story(out))
    assert re.search(r"world 2: 2 ranks from commit \d+ on the disk", out)
    check(out, 2)


def test_an_agent_that_is_stopped_when_the_next_supervisor_comes(
    elastic_ranks: Start, tmp_path: Path
) -> None:
    """The next agent kills it."""
    limits = {"FARANDOLE_CHECKPOINT_SECONDS": "0", "FARANDOLE_PEER_TIMEOUT": "3"}
    options = ("--checkpoint-dir", str(tmp_path / "kept"))
    job = elastic_ranks(holding(), 2, *options, **limits)
    job.process.wait_for_output("holds")
    os.kill(agent_of(job), signal.SIGSTOP)
    os.kill(job.process.pid, signal.SIGKILL)
    new = elastic_ranks(holding(), 2, *options, **limits)
    new.process.wait_for_output("world 2: 2 ranks from commit ")
    (tmp_path / "go").touch()
    out = new.finish().check().out
    check(out, 2)
    job.finish()
    assert "ends" not in all_of(job)


def test_grace_that_is_over(elastic_ranks: Start) -> None:
    """A rank that does not come to a commit is ended by the kernel."""
    hangs = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)"
    source = training(DIES.format(victim=1, step=6, end=hangs))
    out = elastic_ranks(source, 2, FARANDOLE_GRACE="1").finish().check().out
    assert "within 1 s" in out
    assert "rank 1 was killed by SIGALRM" in story(out)
    check(out, 2)


# ---- signals to the supervisor


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGQUIT, 131)])
def test_an_impatient_user(elastic_ranks: Start, number: int, code: int) -> None:
    """Twice, from a terminal, which signals its group; ranks that mind no signal end too."""
    job = elastic_ranks(STUBBORN, 2)
    for text in ("waits", "all ranks are killed"):
        job.process.wait_for_output(text)
        if job.process.returncode is None:
            os.killpg(job.process.pid, number)
    assert job.finish().returncode == code


def test_grace_that_is_over_for_all(elastic_ranks: Start) -> None:
    event = "if state.steps == 6: print('sleeps', flush=True); time.sleep(1000)"
    job = elastic_ranks(training(event), 2, FARANDOLE_GRACE="1")
    job.process.wait_for_output("sleeps")
    job.process.signal(signal.SIGTERM)
    result = job.finish()
    assert result.returncode == 75, result.out
    assert "ranks have not left in time: they are killed" in result.out


# ---- supervisors that are killed


def test_ranks_that_do_not_leave_when_the_supervisor_is_killed(elastic_ranks: Start) -> None:
    """The agent kills them, and ends."""
    job = elastic_ranks(STUBBORN, 2, FARANDOLE_PEER_TIMEOUT="2")
    job.process.wait_for_output("waits")
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()
    out = all_of(job)
    assert "the supervisor has not answered in time: this agent ends" in out


def test_the_same_command_at_once(elastic_ranks: Start, tmp_path: Path) -> None:
    """It ends the ranks of the one that was killed, and goes on from the disk without them."""
    options = ("--checkpoint-dir", str(tmp_path / "kept"))
    limits = {"FARANDOLE_CHECKPOINT_SECONDS": "0", "FARANDOLE_PEER_TIMEOUT": "1000"}
    job = elastic_ranks(holding(), 2, *options, **limits)
    job.process.wait_for_output("holds")
    os.kill(job.process.pid, signal.SIGKILL)
    new = elastic_ranks(holding(), 2, *options, **limits)
    new.process.wait_for_output("world 2: 2 ranks from commit 9 on the disk")
    job.finish()
    assert "ends" not in all_of(job)
    (tmp_path / "go").touch()
    check(new.finish().check().out, 2)


def test_two_supervisors(elastic_ranks: Start, tmp_path: Path) -> None:
    """The second one changes nothing, and says why."""
    options = ("--checkpoint-dir", str(tmp_path / "kept"))
    job = elastic_ranks(holding(), 2, *options)
    job.process.wait_for_output("holds")
    result = elastic_ranks(holding(), 2, *options).finish()
    assert result.returncode == 2
    assert f"another `farandole run` uses {tmp_path}/kept; remedy: " in result.out
    (tmp_path / "go").touch()
    check(job.finish().check().out, 2)
