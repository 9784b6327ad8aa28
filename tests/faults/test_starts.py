# SPDX-License-Identifier: Apache-2.0
"""Programs that farandole starts: from a folder where a stranger has left packages, in a process
with threads, and for a user without a home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import farandole
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import PATIENCE, ended

# ---- packages in the working folder

PLANTED = ("farandole", "mpi4py", "cloudpickle", "runpy")
PROGRAM = """
import numpy as np
import farandole as fd
import beside  # in the program's own folder

fd.init()
total = fd.allreduce(np.array([fd.rank() + 1.0, 3.0 / fd.size()]), op=fd.Sum)
print(beside.WORD, total.tolist(), flush=True)
"""
FUNCTION = """
import farandole

def function():
    import farandole as fd
    import numpy as np
    import beside

    fd.init()
    return beside.WORD, fd.allreduce(np.full(2, fd.rank() + 1.0), op=fd.Sum).tolist()

print(farandole.run(function, np=2))
"""


def plant(folder: Path) -> Path:
    """Packages in a folder that everybody may write to; whoever imports one leaves a file."""
    folder.mkdir()
    folder.chmod(0o777)
    gained = folder / "gained"
    for name in PLANTED:
        (folder / name).mkdir()
        text = f"open({str(gained)!r}, 'a').write({name!r})\nraise SystemExit('planted')\n"
        (folder / name / "__init__.py").write_text(text)
    return gained


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program, and a module of its own beside it, in another folder than the working one."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "own" / "program.py").write_text(PROGRAM)
    (tmp_path / "own" / "function.py").write_text(FUNCTION)
    return tmp_path / "own" / "program.py"


def in_planted_folder(command: list[str], folder: Path, reach: str) -> str:
    """What `command` prints there. The plant must be in reach of Python's -m."""
    gained = plant(folder)
    subprocess.run([sys.executable, "-m", reach], cwd=folder, capture_output=True)
    assert gained.read_text() == reach, "the plant is out of reach"
    gained.unlink()
    done = ended(command, cwd=folder)
    assert not gained.exists(), f"{gained.read_text()} of a stranger has run"
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("route", ["farandole run --elastic", "horovodrun"])
def test_packages_that_strangers_left_in_the_working_folder(
    route: str, program: Path, tmp_path: Path
) -> None:
    """No helper process imports them; the program finds its own modules."""
    program_folder = Path(farandole.__file__).parent / "as_horovod" / "path" / "bin"
    name, *options = route.split()
    path = f"{program_folder}:{os.environ['PATH']}"
    start = ["env", f"PATH={path}", f"AS_HOROVOD_PYTHON={sys.executable}", name, *options]
    command = [*start, "-np", "2", sys.executable, str(program)]
    out = in_planted_folder(command, tmp_path / "open", "farandole")
    assert out.splitlines() == ["found [3.0, 3.0]"] * 2


def test_packages_that_strangers_left_and_the_question_for_the_mpi(tmp_path: Path) -> None:
    """`farandole run` asks in Slurm which MPI a rank would load."""
    (tmp_path / "own.py").write_text(
        "from farandole.launch import commands; print(commands._loaded())"
    )
    command = [sys.executable, str(tmp_path / "own.py")]
    assert "name=" in in_planted_folder(command, tmp_path / "open", "mpi4py")


def test_packages_that_strangers_left_and_a_function(program: Path, tmp_path: Path) -> None:
    """farandole.run() in a program: its ranks find what the program finds."""
    command = [sys.executable, str(program.with_name("function.py"))]
    out = in_planted_folder(command, tmp_path / "open", "cloudpickle")
    assert out == "[('found', [3.0, 3.0]), ('found', [3.0, 3.0])]\n"


PLAIN = "from mpi4py import MPI"
OURS = """
import os
before = os.getcwd()
import numpy as np
import farandole as fd

fd.init()
assert os.getcwd() == before
print("total", fd.allreduce(np.array([fd.rank() + 1.0]), op=fd.Sum)[0], flush=True)
"""


@pytest.mark.parametrize("route", ["init()", "farandole run", "farandole doctor"])
def test_settings_that_strangers_left_in_the_working_folder(tmp_path: Path, route: str) -> None:
    """UCX, which Open MPI loads, reads ucx.conf there: a stranger chose libraries to load, and
    files to overwrite."""
    folder, thesis = tmp_path / "open", tmp_path / "thesis"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "ucx.conf").write_text(f"UCX_LOG_FILE={thesis}\nUCX_LOG_LEVEL=trace\n")
    ended([sys.executable, "-c", PLAIN], cwd=folder, **MPI_ENVIRONMENT)
    if not thesis.exists():
        pytest.skip("this MPI reads no ucx.conf")
    thesis.write_text("a year of work")
    (tmp_path / "program.py").write_text(OURS)
    program = [sys.executable, str(tmp_path / "program.py")]
    ours = [sys.executable, "-m", "farandole"]
    words = {
        "init()": program,
        "farandole run": [*ours, "run", "-np", "2", *program],
        "farandole doctor": [*ours, "doctor"],
    }[route]
    done = ended(words, cwd=folder, **MPI_ENVIRONMENT)
    assert thesis.read_text() == "a year of work"
    if "doctor" not in route:
        assert "total" in done.stdout, done.stdout + done.stderr


SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
  case "$1" in -[oip]) shift ;; esac
  shift
done
shift; unset LD_LIBRARY_PATH; exec sh -c "$*"
"""


@pytest.mark.parametrize("named", ["here", "in Open MPI's words", "in a file"])
def test_libraries_that_strangers_left_in_the_working_folder(tmp_path: Path, named: str) -> None:
    """Open MPI's daemon on another host puts its libraries before an empty part of the search path,
    which is the working folder of the ranks: they loaded libraries from there."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    program = "import os; print('searched:', os.environ['LD_LIBRARY_PATH'].split(':'))"
    (tmp_path / "hosts").write_text("127.0.0.9 slots=1\n")
    words = {"here": "", "in a file": f"--hostfile {tmp_path / 'hosts'}"}
    host = words.get(named, "-H 127.0.0.9:1")
    run = ["run", "-np", "1", f"--mpi-args=--prtemca plm_ssh_agent {tmp_path / 'ssh'} {host}"]
    run += ["-H", "127.0.0.9:1"] if named == "here" else []
    start = ["env", "-u", "LD_LIBRARY_PATH", sys.executable, "-m", "farandole", *run]
    done = ended([*start, sys.executable, "-c", program], cwd=tmp_path, **MPI_ENVIRONMENT)
    assert "searched: ['/" in done.stdout, done.stdout + done.stderr
    assert "''" not in done.stdout


# ---- a process with threads

THREADS = """
import os, threading, time
from queue import SimpleQueue
from pathlib import Path
from farandole.launch.agent_processes import AgentProcesses
from farandole.launch.job import Job
from farandole.launch.rank_process import RankProcess
from farandole.membership.workers import Workers

held, lock = threading.Event(), threading.Lock()

def holds():
    with lock:
        held.set()
        threading.Event().wait()

threading.Thread(target=holds, daemon=True).start()
held.wait()
os.register_at_fork(after_in_child=lock.acquire)  # as a library's would that guards its state

ends = SimpleQueue()
for script in ("exit 5", "kill -PIPE $$", "kill -KILL -$$"):  # the last needs a group of its own
    process = RankProcess(["sh", "-c", script], dict(os.environ), str, ends.put)
    print("rank", ends.get(), flush=True)
folder = Path("nowhere").absolute()
with AgentProcesses(Job(("true",), 1), folder, "/nowhere 00 00", 30.0) as agents:
    agents.tend((), False, Workers(5.0, (10.0, 600.0)))
    print("agent", flush=True)
"""


def test_a_lock_that_another_thread_holds() -> None:
    """It is held for ever in a child that runs Python between fork and exec. Signals that Python
    ignores act as usual in ranks, which lead groups of their own."""
    try:
        done = ended([sys.executable, "-c", THREADS], PATIENCE / 4)
    except subprocess.TimeoutExpired as reason:
        raise AssertionError(f"hangs after {reason.stdout!r}") from None
    assert (done.returncode, done.stdout) == (0, "rank 5\nrank -13\nrank -9\nagent\n"), done.stderr


# ---- a user without a home

NOBODY = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
homeless = pytest.mark.skipif(
    subprocess.run([*NOBODY, "true"], capture_output=True).returncode != 0,
    reason="needs user namespaces (unshare --user --map-user)",
)


def without_home(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run by a user whose number no passwd entry has."""
    drop = ["env", "-u", "HOME", "-u", "XDG_CONFIG_HOME", "-u", "XDG_CACHE_HOME"]
    check = "assert os.path.expanduser('~') == '~'"
    asks = f"import os, sys; {check}; os.execvp(sys.argv[1], sys.argv[1:])"
    return ended([*drop, *NOBODY, sys.executable, "-c", asks, *command], cwd=cwd)


@homeless
@pytest.mark.parametrize("how", ["python", "run", "run --elastic"])
def test_a_job_without_a_home(how: str, program: Path, tmp_path: Path) -> None:
    words = [] if how == "python" else ["farandole", *how.split(), "-np", "2"]
    done = without_home(*words, "python", str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = 1 if how == "python" else 2
    assert done.stdout.splitlines() == [f"found [{ranks * (ranks + 1) / 2}, 3.0]"] * ranks


def test_a_job_without_the_variable_home(program: Path, tmp_path: Path) -> None:
    """The user has a home, as services do that start without a login."""
    command = ["env", "-u", "HOME", "farandole", "run", "-np", "2", "python", str(program)]
    done = ended(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["found [3.0, 3.0]"] * 2


SAYS = """
from farandole.start import secret
from farandole.tools import cli, tune
print(secret.job_secret(), secret.remedy())
print(tune._refusal(cli.parser().parse_args(["tune"])))
for command in ([], *([name] for name in cli._COMMANDS)):
    try:
        cli.main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0
"""


@homeless
def test_what_is_said_without_a_home(tmp_path: Path) -> None:
    """Where settings would be is unknown: the remedies say what to set. All commands show help."""
    done = without_home("python", "-c", SAYS, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a file that FARANDOLE_JOB_SECRET_FILE names" in done.stdout, done.stderr
    assert "pass --output FILE, or set HOME" in done.stdout, done.stderr
