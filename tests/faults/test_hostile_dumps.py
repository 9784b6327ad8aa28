# SPDX-License-Identifier: Apache-2.0
"""Dumps, live memory and process names that another user has made, read by an administrator."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.process import SLOWNESS

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
PR_SET_NAME = 15
MOST_MEMORY = 4 << 30  # bytes: a reader of small files needs less


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def explain(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "farandole", "explain", str(folder)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each reserves address space
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120 * SLOWNESS,
        env=environment,
        preexec_fn=limited,
    )
    text = ended.stdout + ended.stderr
    assert "Traceback" not in text
    assert "\x1b" not in text
    return ended.returncode, text


def dump(**changes: Any) -> dict[str, Any]:
    page: dict[str, Any] = {"format": "farandole-flight-2", "rank": 0, "size": 2, "world": 1}
    page |= {"pid": 1, "host": "a", "state": "running", "events": [], "open": [], "sets": {}}
    page |= {"now_ns": 2, "began_ns": 1, "epoch_minus_monotonic_ns": 0, "recorded": 0}
    return page | changes


def write(folder: Path, page: dict[str, Any], rank: int = 0) -> Path:
    path = folder / f"flight-rank-{rank}.json"
    path.write_text(json.dumps(page))
    return path


def test_a_dump_as_it_should_be_is_explained(tmp_path: Path) -> None:
    write(tmp_path, dump())
    code, text = explain(tmp_path)
    assert code == 0
    assert "1 of 2 ranks recorded" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": 300_000_000}, "it claims rank 0 of 300000000"),
        ({"size": 10**11}, "it claims rank 0 of 100000000000"),
        ({"rank": 7}, "it claims rank 7 of 2"),
        ({"rank": "x"}, "it claims rank 'x' of 2"),
        ({"rank": ESCAPE}, "not a dump"),
        ({"failure": {"text": "", "code": 1}}, "rank 0 failed"),
        ({"failure": {"code": 1}}, "not written by farandole"),
        ({"events": [{}]}, "not written by farandole"),
        ({"open": 7}, "not written by farandole"),
        ({"open": [[]] * 1_100_000}, "not a dump: it has too many members"),
        ({"story": "x" * (17 << 20)}, "at most 16777216 are read"),
        ({"now_ns": None}, "has no times"),
    ],
    ids=lambda x: str(x)[:30] if isinstance(x, dict) else "",
)
def test_a_hostile_dump_costs_its_reader_little(tmp_path: Path, changes: Any, says: str) -> None:
    write(tmp_path, dump(**changes))
    assert says in explain(tmp_path)[1]


def test_a_dump_of_many_brackets(tmp_path: Path) -> None:
    (tmp_path / "flight-rank-0.json").write_text("[" * 200_000)
    code, text = explain(tmp_path)
    assert code == 1
    assert "is not a complete dump" in text


def test_a_dump_of_nested_lists(tmp_path: Path) -> None:
    nested = "[" * 600 + "]" * 600
    text = json.dumps(dump(open="here")).replace('"here"', nested)
    (tmp_path / "flight-rank-0.json").write_text(text)
    assert explain(tmp_path)[0] == 1


def test_a_link_to_another_dump_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write to the folder could choose among the user's old dumps."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = write(tmp_path / "old", dump(rank=1, began_ns=9, now_ns=9), rank=1)
    write(tmp_path / "new", dump())
    (tmp_path / "new/flight-rank-1.json").symlink_to(old)
    code, text = explain(tmp_path / "new")
    assert code == 1
    assert "flight-rank-1.json" in text


def test_no_terminal_obeys_a_file_name(tmp_path: Path) -> None:
    (tmp_path / f"flight-rank-{ESCAPE}.json").write_text("{}")
    code, text = explain(tmp_path)
    assert code == 1
    assert "owned" in text


@needs_root
def test_a_dump_of_another_user_beside_the_jobs_own_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, dump(failure={"text": "the true cause", "code": 1}))
    os.chown(write(tmp_path, dump(rank=1, began_ns=9, now_ns=9), rank=1), 12345, 12345)
    code, text = explain(tmp_path)
    assert code == 1
    assert "holds dumps of users 0, 12345" in text


@pytest.mark.parametrize("name", [b"\x1b]0;owned\x07\n", b"owned\xff\xfe"], ids=["escape", "bytes"])
def test_no_terminal_obeys_a_process_name(name: bytes) -> None:
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        os.write(write_end, b"x")
        while True:
            signal.pause()
    try:
        assert os.read(read, 1) == b"x"
        command = [sys.executable, "-m", "farandole", "dump", str(child)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120 * SLOWNESS)
        assert "owned" in ended.stderr  # the name has come this far
        assert "Traceback" not in ended.stderr
        assert not {"\x1b", "\x07"} & set(ended.stderr)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
