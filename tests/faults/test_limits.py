# SPDX-License-Identifier: Apache-2.0
"""What a machine may lack: cores cost time only; all else is a typed error with the remedy."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.commands import needs_root
from harness.fork import ForkJob
from harness.process import ended

HEAD = """
import os, resource, sys
import numpy as np
import farandole as fd
"""
CALL = """
try:
    fd.init()
except fd.LibraryError as error:
    print(f"LibraryError: {error}")
    sys.exit()
assert fd.allreduce(np.ones(2))[0] == 1
print("fine")
"""


def alone(source: str, *before: str, **variables: str) -> str:
    """What a world of one prints, which must end well."""
    done = ended([*before, sys.executable, "-c", HEAD + source + CALL], **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("files", [14, 16, 18, 20, 4096])
def test_few_files(files: int) -> None:
    """Counted with three that are open: others may come with the tests."""
    out = alone(
        f"os.closerange(3, 256)\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files},) * 2)\n"
    )
    if files == 4096:
        assert out == "fine\n"
    else:
        assert out.startswith("LibraryError: ")
        assert "ulimit -n" in out


USER = 20_011  # who has no process: the limit counts those of a user, and root has none


@needs_root
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_few_threads(threads: int) -> None:
    out = alone(
        f"os.setgroups([])\nos.setgid({USER})\nos.setuid({USER})\n"
        f"resource.setrlimit(resource.RLIMIT_NPROC, ({threads},) * 2)\n",
        FARANDOLE_RENDEZVOUS="none",
        OPENBLAS_NUM_THREADS="1",
    )
    if threads == 64:
        assert out == "fine\n"
    else:
        assert ("can't start new thread" if threads == 1 else "cannot start the thread") in out
        assert "ulimit -u" in out
        assert "pids.max" in out


NO_THREAD_LEFT = f"""
fd.init()
fd.barrier()
if fd.rank() == 1:
    os.setgroups([])
    os.setgid({USER})
    os.setuid({USER})
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    threading.Event().wait()
try:
    fd.allreduce(np.ones(3), name="wanted")
except fd.FarandoleError as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    os._exit(0)
"""


@needs_root
def test_no_thread_for_a_stack_report(fork_ranks: Callable[..., ForkJob]) -> None:
    """A warning of a stall is no reason to leave the job."""
    limits = {"FARANDOLE_STALL_WARN": "0.3", "FARANDOLE_STALL_ABORT": "1.2"}
    job = fork_ranks(f"{HEAD}\nimport threading\n{NO_THREAD_LEFT}", 2, limits)
    job.ranks[0].wait_for_output("Error: ")
    job.kill(1)
    job.finish()
    assert "StallError: no progress: 'wanted'" in job.ranks[0].output
    assert "no stack report: cannot start the thread" in job.ranks[1].output


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_no_proc() -> None:
    shell = ("unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh")
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29713"}
    out = alone("", *shell, **place)
    assert "LibraryError: init(): farandole needs /proc" in out
    assert "mount -t proc proc /proc" in out


# No rank can do anything while another one spins.
ONE_CORE = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
fd.init()
rank, size = fd.rank(), fd.size()
for i in range(100):
    for n in (1, 40_000):
        handle = fd.allreduce_async(np.full(n, rank + i), op=fd.Sum, name=f"of {n}")
        got, to = np.zeros(n), (rank + 1) % size
        received = fd.recv_async(got, (rank - 1) % size)
        fd.send(np.full(n, 10.0 * rank + i), to)
        assert received.wait() == (rank - 1) % size
        assert (got == 10.0 * ((rank - 1) % size) + i).all()
        assert (handle.wait() == size * i + size * (size - 1) // 2).all()
        assert fd.allgather(np.full(1, rank + i)).tolist() == list(range(i, i + size))
print(fd.metrics()["rescued_wakeups"], "fine", flush=True)
"""


def test_four_ranks_on_one_core(fork_ranks: Callable[..., ForkJob]) -> None:
    for result in fork_ranks(HEAD + ONE_CORE, 4).finish():
        assert result.check().out == "0 fine\n"


# ---- on one rank of several: the same error on all of them

SHORTAGES = {
    "files": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 1,) * 2)",
        r"ulimit -n|Too many open files",
    ),
    "address space": (
        "kb = int([x for x in open('/proc/self/status') if x.startswith('VmSize')][0].split()[1])\n"
        "    resource.setrlimit(resource.RLIMIT_AS, ((kb << 10) + (1 << 19),) * 2)",
        r"[Cc]annot allocate memory|memory",
    ),
}


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_shortage_is_everybodys_error(fork_ranks: Callable[..., ForkJob], shortage: str) -> None:
    limit, text = SHORTAGES[shortage]
    source = f"""{HEAD}
import farandole.start.bootstrap, farandole.start.rendezvous, encodings.idna
if os.environ["FARANDOLE_RANK"] == "1":
    {limit}
try:
    fd.init()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    sys.exit(9)
"""
    job = fork_ranks(source, 3, {"FARANDOLE_INIT_TIMEOUT": "5"})
    assert [r.returncode for r in job.finish()] == [9] * 3, job.output()
    assert re.search(text, job.ranks[1].output), job.output()
    for rank in (0, 2):
        assert re.search("LibraryError|PeerError|OSError|ConnectionError", job.ranks[rank].output)


@needs_root
def test_a_tiny_dev_shm_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        f"{HEAD}fd.init()\nassert fd.allreduce(np.ones(10**6), op=fd.Sum)[7] == fd.size()\n"
    )
    script = (
        "import sys\nfrom harness.fork import ForkJob\n"
        "with ForkJob([sys.executable, sys.argv[1]], 2) as job:\n"
        "    for result in job.finish(): result.check()"
    )
    line = ("sh", "-c", 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "sh")
    command = ["unshare", "--mount", *line, sys.executable, "-c", script, tmp_path / "program.py"]
    done = ended(command, PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.returncode == 0, done.stdout + done.stderr
