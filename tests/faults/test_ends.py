# SPDX-License-Identifier: Apache-2.0
"""One rank ends, in every way a process can, whatever it and the others do: their errors name it
and how it ended, and the job ends. Without MPI (`fork_ranks`) and under mpirun (`mpi_ranks`)."""

import json
import os
import re
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.process import ended

HEAD = """
import ctypes, os, resource, signal, sys, threading
import numpy as np
import farandole as fd

fd.init()
rank, size, victim = fd.rank(), fd.size(), {victim}
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
fd.barrier()

def ends():
{end}

def told(call):
    try:
        while True:
            call()
    except fd.FarandoleError as error:
        print(f"rank {{rank}}: {{type(error).__name__}}: {{error}}.", flush=True)
        raise
"""

# Each rank runs this; the victim ends().
WAIT = """
if rank == victim:
    ends()
else:
    told(lambda: fd.allreduce(np.ones(1000), name="of the others"))
"""
TRAIN = """
import farandole.elastic
state = farandole.elastic.ObjectState(step=0)

@farandole.elastic.run
def train(state):
    while True:
        if state.step == 3 and rank == victim:
            return ends()
        fd.allreduce(np.ones(1), name="step")
        state.step += 1
        state.commit()

train(state) if rank == victim else told(lambda: train(state))
"""
TRAIN_AND_LEAVE = TRAIN.replace("\ntrain(state) if", "\ntry:\n    train(state) if")
TRAIN_AND_LEAVE += "finally:\n    fd.shutdown()\n"

NORMAL, DIED = "finished normally", r"\(pid \d+ on \S+\) died"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# The victim's code, the text that the others read, and its exit code.
ENDS = {
    "exception": ("raise ValueError('boom')", "ValueError: boom", 1),
    "exit code": ("sys.exit(3)", r"sys.exit\(3\)", 3),
    "exit text": ("sys.exit('no data')", "no data", 1),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt", -signal.SIGINT),
    "raised exit": ("raise SystemExit(4)", NORMAL, 4),  # nothing in Python sees this one coming
    "normal end": ("pass", NORMAL, 0),
    "exception while a thread waits": (
        "own = lambda: fd.allreduce(np.ones(2), name='own')\n"
        "threading.Thread(target=own).start()\nraise ValueError('boom')",
        "ValueError: boom",
        1,
    ),
    "exit after a thread's exception": (  # which alone ends nothing
        "thread = threading.Thread(target=lambda: 1 / 0, name='reader')\n"
        "thread.start()\nthread.join()\nsys.exit(5)",
        "sys.exit.5.; in reader ZeroDivisionError",
        5,
    ),
    "_exit": ("os._exit(7)", DIED, 7),
    "segmentation fault": (  # which neither faulthandler nor ASan shall catch
        "signal.signal(signal.SIGSEGV, signal.SIG_DFL); ctypes.string_at(0)",
        DIED,
        -signal.SIGSEGV,
    ),
    "abort": ("os.abort()", DIED, -signal.SIGABRT),
    "SIGKILL": (KILL, DIED, -signal.SIGKILL),
}


def program(end: str, victim: int = 1, does: str = WAIT) -> str:
    return HEAD.format(end=textwrap.indent(end, "    "), victim=victim) + does


def check_told(out: str, ranks: int, victim: int, text: str) -> None:
    for rank in set(range(ranks)) - {victim}:
        found = re.search(rf"^rank {rank}: PeerError: (.*)$", out, re.MULTILINE)
        assert found, out
        assert re.search(rf"rank {victim}\b.*{text}", found[1]), found[1]


def check_ends(job, ranks: int, victim: int, text: str, code: int) -> None:
    results = job.finish()
    check_told(job.output(), ranks, victim, text)
    codes = [code if rank == victim else 1 for rank in range(ranks)]
    assert [result.returncode for result in results] == codes, job.output()


# A coordinator that ends reports it, dies, or ends as all have.
@pytest.mark.parametrize(
    ("end", "ranks", "victim"),
    [
        *((end, 2, 1) for end in ENDS),
        *((end, 3, 0) for end in ("exception", "SIGKILL", "normal end")),
    ],
)
def test_without_mpi(fork_ranks, end, ranks, victim):
    action, text, code = ENDS[end]
    check_ends(fork_ranks(program(action, victim), ranks), ranks, victim, text, code)


# Ends that Python sees, those that only MPI sees, and those of a signal.
@pytest.mark.parametrize(
    "end", ["exception", "interrupt", "raised exit", "normal end", "_exit", "SIGKILL"]
)
def test_under_mpirun(mpi_ranks, end):
    """Rank 0 reports a sudden death, and MPI ends the others. MPICH's launcher may be faster."""
    action, text, _ = ENDS[end]
    result = mpi_ranks(program(action), 3, {"FARANDOLE_LOG_FORMAT": "json"}).finish()
    assert result.returncode != 0
    if text != DIED:
        check_told(result.out, 3, 1, text)
    elif "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES" not in result.out:
        lines = [json.loads(line) for line in re.findall(r'^\{"time_ns".*\}$', result.out, re.M)]
        told = next(line for line in lines if re.search(f"rank 1 {DIED}", line["text"]))
        assert (told["rank"], told["level"]) == (0, "error")


@pytest.mark.parametrize(
    ("launcher", "does", "end"),
    [
        ("fork_ranks", TRAIN, "interrupt"),
        ("fork_ranks", TRAIN, "normal end"),
        ("fork_ranks", TRAIN_AND_LEAVE, "normal end"),
        ("mpi_ranks", TRAIN_AND_LEAVE, "exception"),
    ],
)
def test_in_elastic_training(request, launcher, does, end):
    """All end: under plain mpirun nobody comes in its place."""
    action, text, _ = ENDS[end]
    job = request.getfixturevalue(launcher)(program(action, does=does), 3)
    result = job.finish()
    out = job.output() if launcher == "fork_ranks" else result.out
    check_told(out, 3, 1, text.replace(NORMAL, "ended normally") + ".*does not come back")
    assert launcher == "fork_ranks" or result.returncode != 0


# ---- how a death is seen


def test_without_pidfd(fork_ranks):
    env = {"FARANDOLE_DEATH_WATCH": "socket"}
    check_ends(fork_ranks(program("os._exit(7)", 0), 3, env), 3, 0, DIED, 7)


# Its pid is 1 in there, and means another process outside.
@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="needs unshare --pid (root)",
)
def test_in_a_pid_namespace_of_its_own(fork_ranks):
    inside = """
import os, subprocess, sys
if os.environ["FARANDOLE_RANK"] == "1" and "INSIDE" not in os.environ:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, __file__]
    sys.exit(subprocess.run(command, env={**os.environ, "INSIDE": "1"}).returncode)
"""
    check_ends(fork_ranks(inside + program("os._exit(7)"), 3), 3, 1, DIED, 7)


@pytest.mark.parametrize("watch", ["pidfd", "socket"])
def test_forked_workers_that_outlive_their_rank(fork_ranks, watch):
    end = "if os.fork() == 0: threading.Event().wait()\nos._exit(7)"
    job = fork_ranks(program(end), 3, {"FARANDOLE_DEATH_WATCH": watch})
    for rank in (0, 2):
        job.ranks[rank].wait_for_output(f"rank {rank}: ")
    check_told(job.output(), 3, 1, DIED)
    job.close()  # the worker is ours to end


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A memory cgroup (version 1 or 2) of its own below this process's; it grants 64 MB."""
    own = re.findall(r"^\d+:(memory)?:(/.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    for controller, path in own:
        parent = Path("/sys/fs/cgroup", controller, path.lstrip("/"))
        group = parent / f"farandole-test-{os.getpid()}"
        limit = "memory.limit_in_bytes" if controller else "memory.max"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(64 << 20))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("needs a memory cgroup that can be written to (root)")


def test_the_kernel_kills_a_rank_for_its_memory(fork_ranks, memory_limit):
    end = (
        f"open('{memory_limit}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "too_much = [b'x' * (1 << 20) for _ in range(4096)]"
    )
    check_ends(fork_ranks(program(end), 2), 2, 1, DIED, -signal.SIGKILL)
    files = [memory_limit / name for name in ("memory.oom_control", "memory.events")]
    text = next(file for file in files if file.exists()).read_text()
    assert re.search(r"^oom_kill 1$", text, re.MULTILINE)


# ---- messages

CALLS = {
    "send": "fd.send(large, victim)",
    "recv": "fd.recv(large, victim)",
    "any": "fd.recv(large, None)",
}
# The victim is killed when the other one waits for it, or when a message of many has begun to come.
MESSAGES = """
from farandole.observe.flight import own_page
pids = fd.allgather_object(os.getpid())
large = np.zeros(10_000_000)

def kill_when(ready):
    while not ready():
        pass
    os.kill(pids[victim], signal.SIGKILL)

receives = (rank == victim) == sends
if moving and receives:
    threading.Thread(target=kill_when, args=(lambda: float(large[0]) != 0,), daemon=True).start()
elif not moving and rank != victim:
    waits = lambda: own_page()["now"]["waiters"]
    threading.Thread(target=kill_when, args=(waits,), daemon=True).start()
if not receives:
    large += 1
if rank == victim and not moving:
    threading.Event().wait()
told(lambda: {call} if rank != victim else (fd.recv if sends else fd.send)(large, 1 - victim))
"""


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize(("victim", "way"), [*((1, way) for way in CALLS), (0, "send")])
def test_the_peer_of_a_message_is_killed(fork_ranks, victim, way, moving):
    does = f"moving, sends = {moving}, {way == 'send'}\n"
    does += MESSAGES.format(call=CALLS[way])
    job = fork_ranks(program("pass", victim, does), 2)
    check_ends(job, 2, victim, DIED, -signal.SIGKILL)
    ends = {"send": f"to rank {victim}", "recv": f"from rank {victim}", "any": "from any rank"}
    assert f"{ends[way]} with tag 0" in job.ranks[1 - victim].output


# ---- what a program does with the error


@pytest.mark.parametrize("then", ["threading.Event().wait()", "pass"])
def test_mpirun_ends_though_a_peer_handles_the_error(mpi_ranks, then):
    does = f"try:\n{textwrap.indent(WAIT, '    ')}except fd.PeerError:\n"
    does += f"    print('handled', flush=True)\n    {then}\n"
    result = mpi_ranks(program("raise ValueError('boom')", does=does), 2).finish()
    assert "handled" in result.out
    assert "farandole: rank 1 has failed" in result.out or then == "pass"
    assert result.returncode != 0


def test_a_caught_exit_is_none_and_hooks_of_others_are_called(fork_ranks):
    end = (
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    fd.barrier()\n    raise ValueError('boom')"
    )
    hook = "def hook(*args):\n    print('own hook')\n    before(*args)\n"
    source = f"import sys\nbefore = sys.excepthook\n{hook}sys.excepthook = hook\n"
    source += program(end, does=WAIT.replace("told(", "fd.barrier(); told("))
    job = fork_ranks(source, 2)
    check_ends(job, 2, 1, "ValueError: boom", 1)
    assert job.output().count("own hook") == 2
    assert "ValueError: boom" in job.ranks[1].output


@pytest.mark.parametrize("who", ["all", "one"])
def test_the_user_finalises_mpi(mpi_ranks, who):
    finalise = "from mpi4py import MPI\nMPI.Finalize()\n"
    if who == "one":
        result = mpi_ranks(program(finalise), 2).finish()
        check_told(result.out, 2, 1, NORMAL)
        assert result.returncode != 0
    else:
        source = program("pass", does=f"{finalise}print(fd.is_initialized())\n")
        assert mpi_ranks(source, 3).finish().check().out.count("False") == 3


def test_ctrl_c_ends_a_wait(fork_ranks):
    # A job that a shell started in the background inherits SIGINT as ignored.
    does = "signal.signal(signal.SIGINT, signal.default_int_handler)\nprint('up', flush=True)\n"
    does += "told(lambda: fd.allreduce(np.ones(2), name=f'of rank {rank} alone'))\n"
    job = fork_ranks(program("pass", 0, does), 2)
    job.wait_for_output("up")
    job.kill(0, signal.SIGINT)
    check_ends(job, 2, 0, "KeyboardInterrupt", -signal.SIGINT)


def test_a_thread_submits_while_another_shuts_down(fork_ranks):
    does = """
def work():
    try:
        for i in range(10**9):
            fd.allreduce(np.ones(1000), name=f"thread {i % 5}")
    except (fd.ShutdownError, fd.PeerError) as error:
        print(type(error).__name__, flush=True)

thread = threading.Thread(target=work)
thread.start()
fd.allreduce(np.ones(1000), name="main")
fd.shutdown()
thread.join()
"""
    job = fork_ranks(program("pass", does=does), 4)
    assert [r.returncode for r in job.finish()] == [0] * 4, job.output()
    assert len(re.findall("^(?:ShutdownError|PeerError)$", job.output(), re.MULTILINE)) == 4


# ---- children, ranks that stay, strangers

FORKS = """
import multiprocessing
def work(i):
    texts = []
    for call in (lambda: fd.allreduce(np.ones(2)), fd.init):
        try:
            call()
        except fd.ShutdownError as error:
            texts.append(str(error))
    return len(texts)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(8)) == [2] * 8
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
found = []
def reduce():  # buckets of many blocks, whose memory the children have, too
    for i in range(20):
        found.append(fd.allreduce(np.full(300_000, rank + i), op=fd.Sum, name="large"))
thread = threading.Thread(target=reduce)
thread.start()
while thread.is_alive():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert [set(x.tolist()) for x in found] == [{2 * i + 1} for i in range(20)]
print('fine')
"""


@pytest.mark.parametrize("launcher", ["fork_ranks", "mpi_ranks"])
def test_a_forked_child_is_refused_and_harmless(request, launcher):
    job = request.getfixturevalue(launcher)(program("pass", does=FORKS), 2)
    found = job.finish()
    results = found if launcher == "fork_ranks" else [found]
    out = "".join(result.check().out for result in results)
    assert out.count("fine") == 2, out


# Memory has no name, and sockets let nobody in: not another user, not without the job's key.
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_another_user_gets_nothing(fork_ranks):
    job = fork_ranks(program("pass", does="print('up', flush=True)\ntold(fd.barrier)\n"), 2)
    job.wait_for_output("up")
    stranger = textwrap.dedent(f"""
        import os, socket
        assert os.getuid() == 65534
        pid = {job.ranks[0].pid}
        for path in (f"/proc/{{pid}}/fd", f"/proc/{{pid}}/map_files", f"/proc/{{pid}}/mem"):
            try:
                os.listdir(path) if not path.endswith("mem") else open(path, "rb")
            except PermissionError:
                print("refused")
        assert not [name for name in os.listdir("/dev/shm") if "farandole" in name]
        for line in open("/proc/net/unix"):
            name = line.split()[-1]
            if "/farandole-" not in name:
                continue
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.settimeout(10)
                connection.connect(name)
                connection.send(bytes(16))
                assert connection.recv(1) == b""
            except (ConnectionError, TimeoutError, PermissionError, FileNotFoundError):
                pass  # the last: another test's, which has ended
        print("nothing")
    """)
    command = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", stranger]
    done = ended(command)
    assert done.stdout.splitlines() == ["refused"] * 3 + ["nothing"], done.stdout + done.stderr
    job.kill(1)
    job.ranks[0].wait_for_output("died")
    job.finish()
