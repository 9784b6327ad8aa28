# SPDX-License-Identifier: Apache-2.0
"""Folders that several users may write to: who exchanges the folder of a job there, or puts links
and pipes where a command writes and reads, gains and harms nothing."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from harness.process import ended

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")

PROGRAM = """
import os, pathlib
import farandole as fd

fd.init()
folder = pathlib.Path(os.environ["FARANDOLE_CHECKPOINT_DIR"])
print("its folder is", folder, flush=True)
folder.rename("gone")
pathlib.Path("results").rename(folder)
print("exchanged", flush=True)
"""


def farandole(*words: object, cwd: Path, **env: str) -> tuple[int, str]:
    done = ended([sys.executable, "-m", "farandole", *map(str, words)], cwd=cwd, **env)
    return done.returncode, done.stdout + done.stderr


def test_a_folder_that_is_exchanged_while_the_job_runs(tmp_path: Path) -> None:
    """In a project's folder any member of the group can do so: the job removed at its end whatever
    had its folder's name then."""
    project = tmp_path / "project"
    (project / "results").mkdir(parents=True)
    (project / "results" / "thesis").write_text("a year of work")
    project.chmod(0o2770)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("run", "--elastic", "-np", 1, sys.executable, tmp_path / "program.py")
    code, text = farandole(*words, cwd=project)
    assert "exchanged" in text, text
    (left,) = [path for path in project.iterdir() if path.name.startswith("elastic-")]
    assert [path.name for path in left.iterdir()] == ["thesis"]
    assert (left / "thesis").read_text() == "a year of work"
    assert code in (0, 2), text  # by whether the job has written again before its end


@needs_root
def test_a_working_folder_that_others_may_exchange(tmp_path: Path) -> None:
    """A job of this host has its folder elsewhere then."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "temporary").mkdir()
    program = (
        "import os, farandole; farandole.init(); print(os.environ['FARANDOLE_CHECKPOINT_DIR'])"
    )
    words = ("run", "--elastic", "-np", 1, sys.executable, "-c", program)
    code, text = farandole(*words, cwd=tmp_path / "open", TMPDIR=str(tmp_path / "temporary"))
    assert code == 0, text
    assert f"{tmp_path}/temporary/elastic-" in text
    assert not [*(tmp_path / "open").iterdir()]
    assert not [*(tmp_path / "temporary").iterdir()]


# ---- what commands write


def trace(path: Path, rank: int) -> None:
    about = {"name": "farandole", "args": {"rank": rank, "size": 2}}
    path.write_text(json.dumps([about, {"name": f"step of {rank}", "ts": 3.0 + rank}]))


def shared(folder: Path, victim: Path) -> Path:
    """A folder in which a stranger has left a link to the victim's file."""
    folder.mkdir()
    folder.chmod(0o777)
    victim.write_text("a year of work")
    return folder


WRITERS = {
    "trace merge": ("run.merged.json", ("trace", "merge", "run.json")),
    "bench --json": (
        "out.json",
        ("bench", "--json", "out.json", "--begin", "8", "--end", "8", "--calls", "1"),
    ),
}


@needs_root
@pytest.mark.parametrize("how", ["link", "victim's link", "link of the folder", "own file"])
@pytest.mark.parametrize("who", WRITERS)
def test_a_command_writes_through_no_link_of_another_user(
    tmp_path: Path, who: str, how: str
) -> None:
    folder = shared(tmp_path / "shared", tmp_path / "victim")
    name, words = WRITERS[who]
    trace(folder / "run.json", 0)
    trace(folder / "run.rank1.json", 1)
    words = tuple(str(folder / word) if word.endswith(".json") else word for word in words)
    target = folder / name
    if "link" in (how, how.partition(" ")[2]):
        target.symlink_to(tmp_path / "victim")
        os.lchown(target, *[STRANGER if how == "link" else 0] * 2)  # it may have been renamed
    elif how == "link of the folder":
        folder.rename(tmp_path / "behind")
        folder.symlink_to(tmp_path / "behind")
        os.lchown(folder, STRANGER, STRANGER)
    elif how == "own file":
        target.write_text("a stranger's, who reads what comes here")
        target.chmod(0o666)
        os.chown(target, STRANGER, STRANGER)
    held = os.open(target, os.O_RDONLY) if how == "own file" else -1
    code, text = farandole(*words, cwd=tmp_path)
    assert (tmp_path / "victim").read_text() == "a year of work"
    if how != "link of the folder":
        assert code == 0, text
        assert json.loads(target.read_text())
        assert target.lstat().st_uid == 0
        assert not target.is_symlink(), "it is replaced"
    if how == "own file":
        assert os.read(held, 100) == b"a stranger's, who reads what comes here"
        os.close(held)
    elif how == "link of the folder":
        assert code != 0
        assert "is a link of user 65534" in text
        assert not (tmp_path / "behind" / name).exists()


def test_merged_traces_are_as_secret_as_the_traces(tmp_path: Path) -> None:
    """A link of one's own on the way is followed."""
    trace(tmp_path / "run.json", 0)
    trace(tmp_path / "run.rank1.json", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").symlink_to("elsewhere")
    code, text = farandole("trace", "merge", "run.json", "-o", "here/merged", cwd=tmp_path)
    assert code == 0, text
    merged = tmp_path / "elsewhere" / "merged"
    assert len(json.loads(merged.read_text())["traceEvents"]) == 4
    assert stat.S_IMODE(merged.stat().st_mode) == 0o600
    code, text = farandole("trace", "merge", "run.json", "-o", "/dev/stdout", cwd=tmp_path)
    assert "step of 1" in text


def test_a_pipe_where_a_trace_is_to_be_written(tmp_path: Path) -> None:
    """Below /dev, too: everybody may write to /dev/shm."""
    trace(tmp_path / "run.json", 0)
    trace(tmp_path / "run.rank1.json", 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.mkfifo(f"{folder}/merged")
        words = ("trace", "merge", "run.json", "-o", f"{folder}/merged")
        code, text = farandole(*words, cwd=tmp_path)
    assert code == 2
    assert "it is not a regular file" in text


@pytest.mark.parametrize("how", ["a pipe", "huge"])
def test_a_trace_that_is_no_file(tmp_path: Path, how: str) -> None:
    """Nobody waits for a pipe's writer."""
    trace(tmp_path / "run.json", 0)
    other = tmp_path / "run.rank1.json"
    if how == "a pipe":
        os.mkfifo(other)
    else:
        with other.open("wb") as file:
            file.truncate(1 << 40)
    code, text = farandole("trace", "merge", "run.json", cwd=tmp_path)
    assert code == 1
    assert "is not a regular file" in text or "at most" in text
