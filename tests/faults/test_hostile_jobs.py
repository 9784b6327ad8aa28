# SPDX-License-Identifier: Apache-2.0
"""Looking at what another user has made: flight memory with hostile numbers, names that a terminal
would obey, dumps that are pipes or huge, tuning files. Without MPI (fork launcher)."""

import os
import re
import stat
import subprocess
import sys

import pytest

from harness.process import SLOWNESS, ended

STRANGER = 65534

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


def farandole(*arguments, **env):
    result = ended([sys.executable, "-m", "farandole", *map(str, arguments)], **env)
    return result.returncode, result.stdout + result.stderr


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


@needs_root
def test_flight_memory_of_another_user_harms_no_reader(fork_ranks, tmp_path):
    job = fork_ranks(HOSTILE, 1, {"FARANDOLE_FLIGHT_DIR": ""})
    job.wait_for_output("altered")
    pid = job.ranks[0].pid
    _, text = farandole("dump", "--into", tmp_path / "none")
    assert str(pid) not in re.findall(r"\d+", text)  # root looks at its own jobs only
    code, text = farandole("dump", pid, "--into", tmp_path / "dumps")  # asked for by number
    assert code in (0, 1), text  # no signal


def test_only_this_user_may_read_dumps(fork_ranks, tmp_path):
    job = fork_ranks(NAMES, 2)
    job.wait_for_output("up")
    folder = tmp_path / "dumps"
    code, text = farandole("dump", job.ranks[0].pid, "--into", folder)
    assert code == 0, text
    modes = [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()]
    assert modes == [0o600, 0o600]


def test_no_terminal_obeys_names(fork_ranks, tmp_path):
    job = fork_ranks(NAMES, 2)
    job.wait_for_output("up")
    pid, folder = job.ranks[0].pid, tmp_path / "dumps"
    texts = [farandole("dump", pid, "--into", folder)[1]]
    raw = (folder / "flight-rank-1.json").read_text()
    assert "evil" in raw  # the names have come this far
    texts.append(farandole("explain", folder)[1])
    assert "evil" in texts[1]
    for text in texts:
        assert not set("\x1b\x07\u202e") & set(text)
    output = job.output()
    assert "/x1b]0;evil" in output.replace("\\", "/")
    assert "\x1b]0;" not in output


def test_dumps_that_are_pipes_or_huge_are_refused(tmp_path):
    os.mkfifo(tmp_path / "flight-rank-0.json")
    code, text = farandole("explain", tmp_path)
    assert code == 1
    assert "is not a regular file" in text
    (tmp_path / "flight-rank-0.json").unlink()
    with (tmp_path / "flight-rank-0.json").open("wb") as file:
        file.truncate(10 << 30)
    code, text = farandole("explain", tmp_path)
    assert code == 1
    assert "at most 16777216 are read" in text


@needs_root
@pytest.mark.parametrize("how", ["another user's", "for all to write", "a pipe"])
def test_a_tuning_file_of_others_is_refused(tmp_path, how):
    path = tmp_path / "tuning.conf"
    if how == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text("FARANDOLE_BLOCK_BYTES = 65536\n")
        path.chmod(0o666 if how == "for all to write" else 0o644)
    if how == "another user's":
        os.chown(path, STRANGER, -1)
    result = subprocess.run(
        [sys.executable, "-c", "import farandole as fd; fd.init(); print('read')"],
        env={**os.environ, "FARANDOLE_TUNING": str(path)},
        capture_output=True,
        text=True,
        timeout=60 * SLOWNESS,
    )
    assert "read" not in result.stdout
    assert f"tuning file {path}" in result.stderr
