# SPDX-License-Identifier: Apache-2.0
"""The launchers themselves: a harness that cannot fail, or leaves processes, proves nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from farandole.start.rendezvous import RendezvousServer, connect, exchange, leave
from harness import process
from harness.fork import ForkJob
from harness.proc import processes_of_sessions
from harness.process import JobError
from harness.sizes import POSSIBLE, TABLE, marks, own_sizes, sizes_of
from harness.world import TESTS

MEET = """
import os
from farandole.start.rendezvous import connect, exchange
rank, size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])
meeting = connect(os.environ["FARANDOLE_RENDEZVOUS"].removeprefix("unix:"), rank)
print(exchange(meeting, b"rank %d" % rank), flush=True)
"""
RANK_0_WAITS_FOR_EVER = """
if rank == 0:
    __import__("signal").pause()
exchange(meeting, b"")
"""
BAD_TESTS = """
import os
import numpy as np
import farandole as fd

def total():
    return float(fd.allreduce(np.full(1, fd.rank() + 1.0), op=fd.Sum)[0])

def test_before():
    assert total() == 3

def test_bad_on_all():
    assert total() == 4

def test_bad_on_one():
    assert fd.rank() == 0
    total()  # waits for rank 1

def test_death():
    if fd.rank() == 1:
        os._exit(3)
    total()

def test_after():
    assert total() == 3
"""
LEAVES_THINGS = """
import os, sys
import numpy as np
import farandole as fd

def test_it():
    with open("runs", "a") as runs:
        print("a rank", file=runs)
    sys.seen_by_all_files = True
    os.environ["LEFT_BEHIND"] = "1"
    fd.add_process_set([0])
    fd.allreduce_async(np.ones(1), name="in flight")
"""
FINDS_NOTHING = """
import os, sys
import numpy as np
import farandole as fd

def test_it():
    assert sys.seen_by_all_files  # the process is the same
    assert "LEFT_BEHIND" not in os.environ
    assert fd.add_process_set([0]).process_set_id == 1
    assert fd.allreduce(np.full(2, fd.rank()), name="in flight", op=fd.Sum).tolist() == [1, 1]
"""
FINDS_ANOTHER_PROCESS = """
import sys

def test_it():
    assert not hasattr(sys, "seen_by_all_files")
"""
# As tests/conftest.py, without hypothesis, whose import takes as long as all else.
CONFTEST = """
import os

if "FARANDOLE_TEST_STEP" not in os.environ:
    pytest_plugins = ["harness.outer"]
"""


def in_threads(body: Callable[[int], None], ranks: int) -> None:
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_rendezvous_gathers_in_rank_order_and_starts_again() -> None:
    seen: list[list[bytes]] = []

    def rank(number: int) -> None:
        for _ in range(20):  # generations: a fast rank comes back before a slow one has left
            with connect(server.address, number) as meeting:
                for length in (0, 1, 100_000):
                    seen.append(exchange(meeting, bytes([number]) * (length + number)))

    with RendezvousServer(3) as server:
        in_threads(rank, 3)
        assert server.rounds == 60
    assert len(seen) == 180
    for answer in seen:
        assert [set(part) for part in answer[1:]] == [{1}, {2}]
        assert len(answer[0]) + 2 == len(answer[1]) + 1 == len(answer[2])


def test_rendezvous_refuses_a_second_rank_of_one_number() -> None:
    with (
        RendezvousServer(2) as server,
        connect(server.address, 1) as first,
        connect(server.address, 1) as second,
    ):
        for meeting, text in ((first, "rank 1 has ended or left"), (second, "another rank")):
            with pytest.raises(ConnectionError, match=text):
                exchange(meeting, b"")


def test_rendezvous_tells_who_leaves_and_why() -> None:
    with RendezvousServer(3) as server:
        lines = [connect(server.address, rank) for rank in range(3)]
        for reason, text in (
            (ValueError("init(): no"), "rank 2 has ended or left: no"),
            (KeyboardInterrupt(), "rank 2 has ended or left: KeyboardInterrupt"),
        ):
            leave(lines[2], reason)
            for line in lines[:2]:
                with pytest.raises(ConnectionError, match=text):
                    exchange(line, b"data", 60)
                line.close()
            lines = [connect(server.address, rank) for rank in range(3)]
        for line in lines:
            line.close()


def test_rendezvous_tells_a_rank_that_has_sent_too_late() -> None:
    """Its own message finds the connection closed; the reason is still there."""
    with RendezvousServer(2) as server, connect(server.address, 0) as line:
        leave(connect(server.address, 1), ValueError("no"))
        with suppress(ConnectionError):
            while True:  # until the server has hung up
                line.send(b'{"why": ""}')
        with pytest.raises(ConnectionError, match="rank 1 has ended or left: no"):
            exchange(line, b"data", 60)


def test_a_hang_is_told_with_stacks(fork_ranks: Callable[..., ForkJob]) -> None:
    job = fork_ranks(MEET + RANK_0_WAITS_FOR_EVER, 2)
    job.wait_for_output("rank 1")
    with pytest.raises(JobError, match=r"(?s)ranks \[0, 1\] hung.*exchange \(") as told:
        job.finish(0.2)
    assert str(told.value).count("program.py") >= 2
    assert not processes_of_sessions(job.sessions)


def test_a_process_left_behind_is_an_error(
    fork_ranks: Callable[..., ForkJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EXIT_SECONDS", 1.0)
    source = "import subprocess; subprocess.Popen(['sleep', '60']); print('ends')"
    job = fork_ranks(source, 1)
    with pytest.raises(JobError, match=r"left behind.*sleep"):
        job.finish(30)
    job.close()
    assert not processes_of_sessions(job.sessions)


def test_a_bad_test_loses_no_other(tmp_path: Path) -> None:
    """With --keep-going: whether it fails on all ranks, on one, or takes one along. Files share a
    world until one breaks it, and a file finds none of the settings of those before it. Of two
    processes of pytest only one runs them."""
    tests, own = Path(__file__).resolve().parents[1], tmp_path / "tests"
    shutil.copytree(tests / "harness", own / "harness")
    (own / "conftest.py").write_text(CONFTEST)
    (own / "parallel").mkdir()
    shutil.copy(tests / "parallel" / "conftest.py", own / "parallel")
    files = {"a": LEAVES_THINGS, "b": FINDS_NOTHING, "c": BAD_TESTS, "d": FINDS_ANOTHER_PROCESS}
    for name, text in files.items():
        (own / "parallel" / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "tests", "--ranks", "2", "-p", "no:cacheprovider"]
    command += ["--report", "report.json", "--keep-going"]
    command += ["--budget", str(100 * process.SLOWNESS)]
    result = subprocess.run(
        [*command, "-n", "2", "--dist", "loadgroup"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(own)},
        capture_output=True,
    )
    assert result.returncode == 1, result.stdout.decode()
    assert (tmp_path / "runs").read_text() == "a rank\n" * 2
    told = json.loads((tmp_path / "report.json").read_text())["tests"]
    rows = {Path(name.partition("::")[0]).stem: row for name, row in told.items()}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    expected = {"test_a": "passed", "test_b": "passed", "test_c": "failed", "test_d": "passed"}
    assert outcomes == expected
    found = {test: row["outcome"] for test, row in rows["test_c"]["inside"].items()}
    assert found == {
        "test_before": "passed",
        "test_bad_on_all": "failed",
        "test_bad_on_one": "failed",
        "test_death": "failed",
        "test_after": "passed",
    }
    for text in ("assert 3.0 == 4", "exit code 3"):
        assert text in rows["test_c"]["text"]


def test_every_test_runs_at_one_of_its_files_sizes() -> None:
    files = [path for name in POSSIBLE for path in (TESTS / name).glob("test_*.py")]
    listed = {name for *_, names, _ in TABLE for name in names.split()}
    assert listed <= {path.stem.removeprefix("test_") for path in files}
    for path in files:
        found = set(sizes_of(path, ci=True))
        assert found <= set(own_sizes(path)), path
        for sizes in marks(path):
            assert set(sizes) & found, f"{path}: none of {sizes}"
