# SPDX-License-Identifier: Apache-2.0
"""Jobs of `farandole run --elastic` whose disk fails for a moment or whose words nobody reads, and
agents that never start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.proc import processes_of_sessions
from harness.process import PATIENCE, wait_until_gone
from harness.supervised import SupervisedJob, farandole_run, story
from harness.worlds import check, training

Start = Callable[..., SupervisedJob]
HOLDS = """
    if state.steps == 9:
        print(f"rank {fd.rank()} is {os.getpid()}", flush=True)
        while True:
            state.check_host_updates()
"""
FAILS = "No such file or directory; farandole tries again"


@contextlib.contextmanager
def renamed(folder: Path) -> Iterator[None]:
    """The folder is away, as a network's is whose server starts again."""
    away = folder.with_name("away")
    folder.rename(away)
    yield
    away.rename(folder)


def test_a_death_while_the_disk_is_away(elastic_ranks: Start, tmp_path: Path) -> None:
    """The commit is in memory: the next world does not wait for the disk."""
    folder = tmp_path / "job"
    env = {"FARANDOLE_CHECKPOINT_SECONDS": "1000"}
    job = elastic_ranks(training(HOLDS), 2, "--checkpoint-dir", str(folder), **env)
    for rank in (0, 1):
        job.process.wait_for_output(f"rank {rank} is ")
    found = re.search(r"rank 1 is (\d+)", job.process.output)
    assert found
    with renamed(folder):
        job.kill_rank(int(found[1]), signal.SIGKILL)
        job.process.wait_for_output("world 2: 2 ranks from commit 9\n")
    check(job.finish().check().out, 2)


def test_all_are_lost_while_the_disk_is_away(elastic_ranks: Start, tmp_path: Path) -> None:
    """The next world begins when it is back, from the commit there."""
    folder = tmp_path / "job"
    env = {"FARANDOLE_CHECKPOINT_SECONDS": "0", "FARANDOLE_PEER_TIMEOUT": "6"}
    job = elastic_ranks(training(HOLDS), 1, "--checkpoint-dir", str(folder), **env)
    job.process.wait_for_output("rank 0 is ")
    found = re.search(r"rank 0 is (\d+)", job.process.output)
    assert found
    with renamed(folder):
        job.kill_rank(int(found[1]), signal.SIGKILL)
        job.process.wait_for_output(FAILS)
        assert "world 2" not in job.process.output
    out = job.finish().check().out
    assert out.count(FAILS) == 1, "told once"
    assert "the disk works again" in out
    assert "world 2: 1 rank from commit 9 on the disk\n" in out
    check(out, 1)


def test_a_disk_that_fails_for_good(elastic_ranks: Start, tmp_path: Path) -> None:
    """The job ends when it has waited for a world, and says for what."""
    folder, options = tmp_path / "job", ("--elastic-timeout", "5", "--checkpoint-dir")
    job = elastic_ranks(training(HOLDS), 1, *options, str(folder))
    job.process.wait_for_output("rank 0 is ")
    found = re.search(r"rank 0 is (\d+)", job.process.output)
    assert found
    with renamed(folder):
        job.kill_rank(int(found[1]), signal.SIGKILL)
        result = job.finish()
    assert result.returncode == 1
    assert "5 s (--elastic-timeout) without a world, because of the disk: " in result.out
    assert story(result.out)[-1].endswith(f"{folder}: No such file or directory")


# ---- the commit that is there at the start

PRINTS = """
import farandole as fd
from pathlib import Path
fd.init()
print("here", flush=True)
while not Path("go").exists():
    fd.barrier()
"""
HUGE = 1 << 30


def test_the_supervisor_reads_the_header_of_a_commit(elastic_ranks: Start, tmp_path: Path) -> None:
    """Not its tensors, which may be larger than its memory, on a disk that is slow."""
    elastic_ranks(training(), 1, "--checkpoint-dir", str(tmp_path / "job")).finish().check()
    os.truncate(tmp_path / "job" / "call-1" / "commit.safetensors", HUGE)  # a hole behind the end
    job = elastic_ranks(PRINTS, 1, "--checkpoint-dir", str(tmp_path / "job"))
    job.process.wait_for_output("here")
    status = Path(f"/proc/{job.process.pid}/status").read_text()
    (tmp_path / "go").touch()
    out = job.finish().check().out
    assert re.search(r"world 2: 1 rank from commit \d+ on the disk", out), out
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    assert int(peak[1]) << 10 < HUGE // 2, "it has read all"


# ---- who reads the words


def test_nobody_reads_what_the_supervisor_says(tmp_path: Path) -> None:
    """As in a pager: the job does not wait for it, and its agents hear from the supervisor."""
    (tmp_path / "program.py").write_text(training("time.sleep(1)"))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 12))
    os.set_blocking(writer, True)
    argv = [sys.executable, str(tmp_path / "program.py")]
    command = farandole_run(["-np", "1", "--checkpoint-dir", str(tmp_path / "job")], argv)
    env = {**os.environ, "FARANDOLE_PEER_TIMEOUT": "4"}
    with (tmp_path / "out").open("wb") as out:
        job = subprocess.Popen(command, env=env, stdout=out, stderr=writer, start_new_session=True)
    os.close(writer)
    try:
        assert job.wait(PATIENCE) == 0
    finally:
        wait_until_gone({job.pid}, kill=True)
        os.close(reader)
    check((tmp_path / "out").read_text(), 1, 1)


# ---- agents


def test_a_folder_whose_name_is_no_text(elastic_ranks: Start, tmp_path: Path) -> None:
    """File names are bytes."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    out = elastic_ranks(training(), 2, "--checkpoint-dir", folder).finish().check().out
    check(out, 2)


def test_an_agent_that_never_starts(elastic_ranks: Start, tmp_path: Path) -> None:
    """The job ends after a few attempts, and not for want of hosts."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'no python here' >&2\nexit 127\n")
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ("-H", "faraway:2,farther:2", "--elastic-timeout", "60")
    result = elastic_ranks(training(), 2, *words, PATH=path).finish()
    assert result.returncode == 1
    assert "no python here" in result.out
    last = story(result.out)[-1]
    assert last.startswith("the agent on faraway has ended with 127 at each of 6 starts"), last
    assert "the agent on farther has ended with 127" in last


def test_a_supervisor_that_is_preempted_before_a_commit(
    elastic_ranks: Start, tmp_path: Path
) -> None:
    """It does not say that a state is on the disk."""
    options = ("--checkpoint-dir", str(tmp_path / "job"))
    job = elastic_ranks("import time\nprint('waits', flush=True)\ntime.sleep(600)", 1, *options)
    job.process.wait_for_output("waits")
    job.process.signal(signal.SIGTERM)
    job.process.wait_for_output("all ranks leave")
    for process in processes_of_sessions({job.process.pid}):
        if process.command.split("\0")[1:2] == [str(tmp_path / "program.py")]:
            os.kill(process.pid, signal.SIGTERM)
    result = job.finish()
    assert result.returncode == 75
    assert "all ranks have left, but no state is on the disk" in story(result.out)
