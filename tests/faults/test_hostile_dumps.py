# SPDX-License-Identifier: Apache-2.0
"""Dumps, live memory, names and tuning files of another user, read by an administrator."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.commands import farandole, needs_root
from harness.fork import ForkJob
from harness.process import SLOWNESS, ended

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
STRANGER = 65534
PR_SET_NAME = 15
MOST_MEMORY = 4 << 30  # bytes: a reader of small files needs less


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


EXPLAINS = """
import sys
from farandole.tools import cli
for folder in sys.argv[1:]:
    code = cli.main(["explain", folder])
    print("ended with", code, flush=True)
"""


def explain_each(folders: list[Path]) -> list[tuple[int, str]]:
    """The exit code and output of `farandole explain` for each folder, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", EXPLAINS, *map(str, folders)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120 * SLOWNESS,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each reserves address space
        preexec_fn=limited,
    )
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    found = re.findall(r"(.*?)ended with (\d)\n", done.stdout, re.DOTALL)
    return [(int(code), text) for text, code in found]


def explain(folder: Path) -> tuple[int, str]:
    return explain_each([folder])[0]


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


CLAIMS: list[tuple[dict[str, Any], str]] = [
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
]


def folders(tmp_path: Path, count: int) -> list[Path]:
    made = [tmp_path / str(number) for number in range(count)]
    for folder in made:
        folder.mkdir()
    return made


def test_hostile_dumps_cost_their_reader_little(tmp_path: Path) -> None:
    places = folders(tmp_path, len(CLAIMS))
    for folder, (changes, _) in zip(places, CLAIMS, strict=True):
        write(folder, dump(**changes))
    for (changes, says), (_, text) in zip(CLAIMS, explain_each(places), strict=True):
        assert says in text, str(changes)[:100]


def nested(path: Path) -> None:
    path.write_text(json.dumps(dump(open="here")).replace('"here"', "[" * 600 + "]" * 600))


def hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "many brackets": (lambda path: path.write_text("[" * 200_000), "is not a complete dump"),
    "nested lists": (nested, ""),
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a hole": (hole, "at most 16777216 are read"),
}


def test_files_that_are_no_dumps(tmp_path: Path) -> None:
    places = folders(tmp_path, len(FILES))
    for folder, (make, _) in zip(places, FILES.values(), strict=True):
        make(folder / "flight-rank-0.json")
    for (kind, (_, says)), (code, text) in zip(FILES.items(), explain_each(places), strict=True):
        assert code == 1, kind
        assert says in text, kind


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
        _, text = farandole("dump", child)
        assert "owned" in text  # the name has come this far
        assert "Traceback" not in text
        assert not {"\x1b", "\x07"} & set(text)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- jobs of the fork launcher

# Rank 0's page begins at the first whole page; its identity is a stamp, then rank, size, world.
HOSTILE = f"""
import mmap, os, signal, struct
import farandole as fd

fd.init()
fd.shutdown()
for name in [name for name in os.environ if name.startswith("FARANDOLE_")]:
    del os.environ[name]  # a world of one
os.setuid({STRANGER})  # after all is imported: this user may not read Python's files
fd.init()
names = {{n: os.readlink(f"/proc/self/fd/{{n}}") for n in map(int, os.listdir("/proc/self/fd"))
         if os.path.islink(f"/proc/self/fd/{{n}}")}}
memory = next(n for n, name in names.items() if name.startswith("/memfd:farandole-flight"))
with mmap.mmap(memory, 0) as page:
    rank, size = struct.unpack_from("<ii", page, 4096 + 8)
    assert (rank, size) == (0, 1), (rank, size)
    struct.pack_into("<i", page, 4096 + 8, 1 << 30)
print("altered", flush=True)
signal.pause()
"""

NAMES = """
import os, threading
import numpy as np
import farandole as fd

fd.init()
evil = chr(27) + "]0;evil" + chr(7) + "\\u202e"
fd.allreduce(np.ones(3), name="x" + evil)
if fd.rank() == 0:
    waiting = fd.allreduce_async(np.ones(3), name="w" + evil)
else:
    try:
        fd.allreduce(np.ones(3), name="m" + evil, timeout=0.2)
    except fd.StallError as error:
        print(repr(str(error)).replace(chr(92), "/"), flush=True)
print("up", flush=True)
threading.Event().wait()
"""


@needs_root
def test_flight_memory_of_another_user_harms_no_reader(
    fork_ranks: Callable[..., ForkJob], tmp_path: Path
) -> None:
    job = fork_ranks(HOSTILE, 1, {"FARANDOLE_FLIGHT_DIR": ""})
    job.wait_for_output("altered")
    pid = job.ranks[0].pid
    _, text = farandole("dump", "--into", tmp_path / "none")
    assert str(pid) not in re.findall(r"\d+", text)  # root looks at its own jobs only
    code, text = farandole("dump", pid, "--into", tmp_path / "dumps")  # asked for by number
    assert code in (0, 1), text  # no signal


def test_no_terminal_obeys_names(fork_ranks: Callable[..., ForkJob], tmp_path: Path) -> None:
    """And only this user may read the dumps."""
    job = fork_ranks(NAMES, 2)
    job.wait_for_output("up")
    folder = tmp_path / "dumps"
    code, text = farandole("dump", job.ranks[0].pid, "--into", folder)
    assert code == 0, text
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600] * 2
    assert "evil" in (folder / "flight-rank-1.json").read_text()  # the names have come this far
    texts = [text, farandole("explain", folder)[1]]
    assert "evil" in texts[1]
    for each in texts:
        assert not set("\x1b\x07\u202e") & set(each)
    assert "/x1b]0;evil" in job.output().replace("\\", "/")
    assert "\x1b]0;" not in job.output()


@needs_root
@pytest.mark.parametrize("how", ["another user's", "for all to write", "a pipe"])
def test_a_tuning_file_of_others_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "tuning.conf"
    if how == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text("FARANDOLE_BLOCK_BYTES = 65536\n")
        path.chmod(0o666 if how == "for all to write" else 0o644)
    if how == "another user's":
        os.chown(path, STRANGER, -1)
    program = "import farandole as fd; fd.init(); print('read')"
    result = ended([sys.executable, "-c", program], FARANDOLE_TUNING=str(path))
    assert "read" not in result.stdout
    assert f"tuning file {path}" in result.stderr
