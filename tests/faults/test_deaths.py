# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, and machines that give too little: typed errors soon, and nothing left behind.

Under the fork launcher (no MPI), but where a name says mpirun.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.process import ended

SOON = 20.0  # seconds until a peer hears of it on a busy machine; else 2: runtime_death_test

HEAD = """
import ctypes, multiprocessing, os, resource, signal, sys, threading, time
import numpy as np
import farandole as fd
"""
START = (
    HEAD
    + """
fd.init()
rank, size = fd.rank(), fd.size()
x = np.full(1000, rank + 1.0)
fd.barrier()

def wait_for_peer():
    try:
        while True:
            fd.allreduce(x, name="of the others")
    except fd.PeerError as error:
        print(f"rank {rank} at {time.time()}: {error}.", flush=True)
"""
)

ENDS = {
    "_exit": ("os._exit(7)", 7),
    "segmentation fault": (  # which neither faulthandler nor ASan shall catch
        "signal.signal(signal.SIGSEGV, signal.SIG_DFL); ctypes.string_at(0)",
        -signal.SIGSEGV,
    ),
    "SIGKILL, as of the OOM killer": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "abort": ("os.abort()", -signal.SIGABRT),
}


def dying(victim: int, end: str) -> str:
    return (
        START
        + f"""
if rank == {victim}:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(f"dies at {{time.time()}}.", flush=True)
    {end}
wait_for_peer()
"""
    )


def check_survivors(job, ranks: int, victim: int) -> None:
    died = float(re.search(r"dies at ([\d.]+)\.", job.ranks[victim].output)[1])
    for rank in set(range(ranks)) - {victim}:
        found = re.search(rf"^rank {rank} at ([\d.]+): (.*)$", job.ranks[rank].output, re.MULTILINE)
        assert found, job.output()
        assert float(found[1]) - died < SOON
        assert re.search(rf"rank {victim} \(pid \d+ on \S+\) died", found[2]), found[2]


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (4, 0), (4, 2)])
@pytest.mark.parametrize("end", ENDS)
def test_a_sudden_death(fork_ranks, end, ranks, victim):
    action, code = ENDS[end]
    job = fork_ranks(dying(victim, action), ranks)
    results = job.finish()
    check_survivors(job, ranks, victim)
    assert results[victim].returncode == code
    assert all(results[rank].returncode == 0 for rank in set(range(ranks)) - {victim})


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (4, 3)])
def test_without_pidfd(fork_ranks, ranks, victim):
    job = fork_ranks(dying(victim, "os._exit(7)"), ranks, {"FARANDOLE_DEATH_WATCH": "socket"})
    job.finish()
    check_survivors(job, ranks, victim)


# Its pid is 1 in there, and means another process outside.
@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="needs unshare --pid (root)",
)
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (4, 1)])
def test_in_a_pid_namespace_of_its_own(fork_ranks, ranks, victim):
    inside = f"""
import os, subprocess, sys
if os.environ["FARANDOLE_RANK"] == "{victim}" and "INSIDE" not in os.environ:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, __file__]
    sys.exit(subprocess.run(command, env={{**os.environ, "INSIDE": "1"}}).returncode)
"""
    job = fork_ranks(inside + dying(victim, "os._exit(7)"), ranks)
    results = job.finish()
    check_survivors(job, ranks, victim)
    assert results[victim].returncode == 7


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("watch", ["pidfd", "socket"])
def test_forked_workers_that_outlive_their_rank(fork_ranks, watch, ranks):
    end = (
        "worker = os.fork()\n"
        "    if worker == 0:\n"
        "        print('worker', flush=True)\n"
        "        time.sleep(600)\n"
        "    print(f'dies at {time.time()}.', flush=True)\n"
        "    os._exit(7)"
    )
    source = dying(1, end).replace('print(f"dies at {time.time()}.", flush=True)', "pass", 1)
    job = fork_ranks(source, ranks, {"FARANDOLE_DEATH_WATCH": watch})
    for rank in set(range(ranks)) - {1}:
        job.ranks[rank].wait_for_output(f"rank {rank} at ")
    job.ranks[1].wait_for_output("dies at ")
    check_survivors(job, ranks, 1)
    job.close()  # the worker is ours to end


def test_the_line_under_mpirun_comes_at_once(mpi_ranks):
    source = dying(1, "os.kill(os.getpid(), signal.SIGKILL)")
    delays = []
    while min(delays, default=1.0) > 0.2 and len(delays) < 5:  # a busy machine may be late for once
        result = mpi_ranks(source, 3, {"FARANDOLE_LOG_FORMAT": "json"}).finish()
        assert result.returncode != 0
        died = float(re.search(r"dies at ([\d.]+)\.", result.out)[1])
        lines = [json.loads(line) for line in re.findall(r'^\{"time_ns".*\}$', result.out, re.M)]
        told = [line for line in lines if "died" in line["text"]]
        assert told, result.out
        assert told[0]["rank"] == 0
        assert told[0]["level"] == "error"
        delays.append(told[0]["time_ns"] / 1e9 - died)
    assert min(delays) <= 0.2


# What a machine may lack: every rank gets the same error at init(), and all end.
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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_shortage_at_init_is_everybodys_error(fork_ranks, shortage, ranks):
    limit, text = SHORTAGES[shortage]
    source = (
        HEAD
        + f"""
import farandole.start.bootstrap, farandole.start.rendezvous, encodings.idna
if os.environ["FARANDOLE_RANK"] == "1":
    {limit}
try:
    fd.init()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    sys.exit(9)
"""
    )
    job = fork_ranks(source, ranks, {"FARANDOLE_INIT_TIMEOUT": "5"})
    results = job.finish()
    assert [r.returncode for r in results] == [9] * ranks, job.output()
    assert re.search(text, job.ranks[1].output), job.output()
    assert re.search("LibraryError|PeerError|OSError|ConnectionError", job.ranks[0].output)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs unshare --mount (root)",
)
@pytest.mark.parametrize("size", ["4k", "64k"])
def test_a_tiny_dev_shm_does_not_matter(tmp_path, size):
    program = tmp_path / "program.py"
    program.write_text(
        START + "assert fd.allreduce(np.ones(10**6), op=fd.Sum)[7] == size\nprint('fine')\n"
    )
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from harness.fork import ForkJob
        with ForkJob([sys.executable, {str(program)!r}], 2) as job:
            for result in job.finish():
                print(result.check().out)
    """)
    )
    command = f"mount -t tmpfs -o size={size} none /dev/shm && exec {sys.executable} {script}"
    tests = str(__file__).rsplit("/faults/", 1)[0]
    done = ended(["unshare", "--mount", "sh", "-c", command], PYTHONPATH=tests)
    assert done.stdout.count("fine") == 2, done.stdout + done.stderr


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


def oom_kills(group: Path) -> int:
    files = [group / name for name in ("memory.oom_control", "memory.events")]
    text = next(file for file in files if file.exists()).read_text()
    return int(re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (4, 0)])
def test_the_kernel_kills_a_rank_for_its_memory(fork_ranks, memory_limit, ranks, victim):
    end = (
        f"open('{memory_limit}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "    too_much = [b'x' * (1 << 20) for _ in range(4096)]"
    )
    job = fork_ranks(dying(victim, end), ranks)
    results = job.finish()
    assert results[victim].returncode == -signal.SIGKILL
    assert oom_kills(memory_limit) == 1
    check_survivors(job, ranks, victim)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thread_submits_while_another_shuts_down(fork_ranks, ranks):
    source = (
        START
        + """
def work():
    try:
        for i in range(10**9):
            fd.allreduce(x, name=f"thread {i % 5}")
    except (fd.ShutdownError, fd.PeerError) as error:
        print(type(error).__name__, flush=True)

thread = threading.Thread(target=work)
thread.start()
fd.allreduce(x, name="main")
fd.shutdown()
thread.join()
"""
    )
    job = fork_ranks(source, ranks)
    assert [r.returncode for r in job.finish()] == [0] * ranks, job.output()
    assert len(re.findall("^(?:ShutdownError|PeerError)$", job.output(), re.MULTILINE)) == ranks


# Memory has no name, and sockets let nobody in: not another user, not without the job's key.
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
@pytest.mark.parametrize("ranks", [2, 4])
def test_another_user_gets_nothing(fork_ranks, ranks):
    source = START + "print('up', flush=True)\nwait_for_peer()\n"
    job = fork_ranks(source, ranks)
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
            if not name.startswith("@farandole-"):
                continue
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.settimeout(10)
                connection.connect("\\0" + name[1:])
                connection.send(bytes(16))
                assert connection.recv(1) == b""
            except (ConnectionError, TimeoutError):
                pass
        print("nothing")
    """)
    command = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", stranger]
    done = ended(command)
    assert done.stdout.splitlines() == ["refused"] * 3 + ["nothing"], done.stdout + done.stderr
    job.kill(1)
    job.ranks[0].wait_for_output("died")
    job.finish()
