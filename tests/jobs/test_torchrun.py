# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts, or a program with torchrun's variables: they meet, or say why not."""

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from farandole.launch.place import free_port
from farandole.start import torchrun
from harness.mpirun import MPI_ENVIRONMENT, find_mpirun
from harness.process import Process

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **MPI_ENVIRONMENT}
LIMIT = {"FARANDOLE_INIT_TIMEOUT": "2"}

PROGRAM = """
import os, signal, sys
import numpy as np
import farandole as fd

mode = sys.argv[1]
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
own = os.environ.get("RANK")
if mode.startswith("absent"):
    if own == mode[-1]:
        signal.pause()
    # The two others come together, however long each has taken to start.
    first = "1" if mode == "absent 0" else "0"
    open(sys.argv[0] + ".fifo", "w" if own == first else "r").close()
if mode == "dies" and attempt == "0":  # torchrun ends the others at once: rank 0 says why first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    fd.init()
    if mode == "dies" and (own, attempt) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        total = fd.allreduce(np.full(3, fd.rank() + 1.0), op=fd.Sum)[0]
        print(f"attempt {attempt} rank {fd.rank()} of {fd.size()} has {total:g}.", flush=True)
        fd.shutdown()
        if mode == "moves":
            os.environ["MASTER_PORT"] += "1"
        fd.init()
    if mode == "forks":
        import subprocess
        subprocess.run([sys.executable, "-c", "import farandole as fd; fd.init()"], check=False)
except Exception as error:
    print(f"rank {own} got {type(error).__name__}: {error}", flush=True)
    raise
"""


@pytest.fixture
def start(tmp_path):
    """start(launcher, mode, **variables) -> Process: PROGRAM under it."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with contextlib.ExitStack() as stack:

        def call(launcher, mode="meets", **variables):
            process = Process([*launcher, str(path), mode], {**ENVIRONMENT, **variables})
            return stack.enter_context(process)

        yield call


def ranks(count, *more):
    return [*TORCHRUN, "--standalone", f"--nproc-per-node={count}", *more]


def check_all_met(result, size, attempt=0):
    assert result.returncode == 0, result.out
    total = size * (size + 1) // 2
    for rank in range(size):
        line = f"attempt {attempt} rank {rank} of {size} has {total}."
        assert result.out.count(line) == 2, result.out


def test_jobs_at_once(start):
    """And a child of a rank, which is none."""
    port = f"--master-port={free_port()}"
    jobs = [start(ranks(2)), start([*TORCHRUN, port, "--nproc-per-node=2"], "forks")]
    first, second = (job.end() for job in jobs)
    check_all_met(first, 2)
    check_all_met(second, 2)
    for rank in range(2):
        assert re.search(rf"ShutdownError: .* is a child of rank {rank} ", second.out), second.out


def test_a_rank_that_dies_and_a_restart(start):
    result = start(ranks(2, "--max-restarts=1"), "dies").end()
    assert re.search(r"farandole error: rank 1 .*died", result.out), result.out
    check_all_met(result, 2, attempt=1)


def place(rank, size, port):
    names = {"WORLD_SIZE": size, "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes(start, absent, tmp_path):
    """By torchrun's variables alone: its own start would import torch."""
    os.mkfifo(tmp_path / "program.py.fifo")
    port = free_port()
    places = [place(rank, 3, port) for rank in range(3)]
    jobs = [start([sys.executable], f"absent {absent}", **LIMIT, **own) for own in places]
    del jobs[absent]
    for rank, job in zip({0, 1, 2} - {absent}, jobs, strict=True):
        result = job.end()
        assert result.returncode != 0
        text = f"rank {rank} got StallError: init(): rank {absent} did not come to the rendezvous"
        assert text in result.out, result.out
        assert "WORLD_SIZE says 3 processes, which must all be on this host" in result.out


def test_a_port_that_changes_in_a_living_process(start):
    port = free_port()
    jobs = [start([sys.executable], "moves", **place(rank, 2, port)) for rank in range(2)]
    out = "".join(job.end().check().out for job in jobs)
    for rank in range(2):
        assert out.count(f"rank {rank} of 2 has 3.") == 2


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT= do not give"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK= and MASTER_PORT=1 do not give"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "1"}, "RANK=2 and MASTER_PORT=1 do not"),
        (
            {"WORLD_SIZE": " 2", "RANK": "two", "MASTER_PORT": "1"},
            "RANK=two and MASTER_PORT=1 do not",
        ),
        ({"RANK": "1", "MASTER_PORT": "1"}, "WORLD_SIZE= and RANK=1 contradict"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "WORLD_SIZE=1 and RANK=1 contradict"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two and RANK=0 contradict"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "1"}, "accelerate launch was asked"),
    ],
)
def test_a_promise_that_cannot_be_kept(start, variables, text):
    result = start([sys.executable], **variables).end()
    assert result.returncode == 1
    assert re.search(f"got LibraryError: .*{text}.*Remedy", result.out), result.out


def test_a_promise_of_other_hosts(start):
    """Ranks elsewhere meet by torch's store, which nobody serves here; tests/hosts has better."""
    own = {**place(1, 4, free_port()), "LOCAL_WORLD_SIZE": "2"}
    result = start([sys.executable], **own, **LIMIT).end()
    assert result.returncode == 1
    assert "got StallError: init(): no store answers at MASTER_ADDR" in result.out, result.out


def test_a_world_of_one_in_spite_of_variables(start):
    alone = {"FARANDOLE_RENDEZVOUS": "none"}
    result = start([sys.executable], WORLD_SIZE="2", RANK="1", **alone).end()
    assert result.check().out.count("rank 0 of 1 has 1.") == 2


def listens(process):
    """Whether it has bound the socket where its ranks meet."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    ours = [line.split() for line in sockets if f"/farandole-{os.geteuid()}/" in line]
    links = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(str(link.readlink()))
    return any(f"socket:[{words[6]}]" in links for words in ours)


def test_another_job_with_this_port(start):
    port = free_port()
    first = start([sys.executable], "meets", **place(0, 2, port))
    while not listens(first):
        assert first.returncode is None, first.output
    second = start([sys.executable], **place(0, 2, port)).end()
    assert re.search(rf"LibraryError: .*same MASTER_PORT={port} .*Remedy", second.out), second.out
    start([sys.executable], **place(1, 2, port)).end().check()
    first.end().check()


def test_the_socket_of_a_killed_rank_0_is_waited_for(monkeypatch):
    for name, value in place(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    path, _ = torchrun.open_rendezvous()
    torchrun._server.close()
    monkeypatch.setattr(torchrun, "_server", None)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    assert torchrun.open_rendezvous()[0] == path
    torchrun._server.close()


def test_mpirun_with_variables_of_torchrun(start):
    mpirun = [find_mpirun(), "-np", "2"]
    shell = ["bash", "-c", 'RANK=${OMPI_COMM_WORLD_RANK-$PMI_RANK} exec "$0" "$@"', sys.executable]
    check_all_met(start([*mpirun, *shell], WORLD_SIZE="2").end(), 2)
    check_all_met(start([*mpirun, sys.executable], WORLD_SIZE="2").end(), 2)
    result = start([*mpirun, sys.executable], WORLD_SIZE="4", RANK="1").end()
    assert result.returncode != 0
    text = "says rank . of 2, but WORLD_SIZE=4 and RANK=1 say otherwise. Remedy"
    assert re.search(f"got LibraryError: .*{text}", result.out), result.out
