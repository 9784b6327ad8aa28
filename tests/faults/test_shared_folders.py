# SPDX-License-Identifier: Apache-2.0
"""Folders that several users may write to: who exchanges the folder of a job there, or puts links
and pipes where a command writes and reads, gains and harms nothing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from harness.commands import farandole, needs_root

STRANGER = 65534

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


def bench(path: str, cwd: Path) -> tuple[int, str]:
    words = ("--begin", "8", "--end", "8", "--calls", "1")
    return farandole("bench", "--json", path, *words, cwd=cwd)


def shared(folder: Path, victim: Path) -> Path:
    """A folder in which a stranger has left a link to the victim's file."""
    folder.mkdir()
    folder.chmod(0o777)
    victim.write_text("a year of work")
    return folder


@needs_root
@pytest.mark.parametrize("how", ["link", "victim's link", "link of the folder", "own file"])
def test_a_command_writes_through_no_link_of_another_user(tmp_path: Path, how: str) -> None:
    folder = shared(tmp_path / "shared", tmp_path / "victim")
    target = folder / "out.json"
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
    code, text = bench(str(target), cwd=tmp_path)
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
        assert not (tmp_path / "behind" / "out.json").exists()


def test_a_pipe_where_results_are_to_be_written(tmp_path: Path) -> None:
    """Below /dev, too: everybody may write to /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.mkfifo(f"{folder}/out.json")
        code, text = bench(f"{folder}/out.json", cwd=tmp_path)
    assert code == 2
    assert "it is not a regular file" in text
