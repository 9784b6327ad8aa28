# SPDX-License-Identifier: Apache-2.0
"""A child process of a rank that calls init() is refused, with the reason; the rank goes on.

It inherits the launcher's variables, and would meet MPI a second time as the same rank.
"""

import re
import sys
from collections import Counter

import pytest

from harness.commands import mpi_version
from harness.mpirun import find_mpirun
from harness.process import ended

OPEN_MPI = "Open MPI" in mpi_version()
once = pytest.mark.skipif(not OPEN_MPI, reason="Hydra takes each of its ranks into MPI once")

HEAD = """
import multiprocessing, os, subprocess, sys
import numpy as np
import farandole as fd

def refused():
    try:
        fd.init()
    except fd.ShutdownError as error:
        return f"refused: {error}"
    return f"a rank of {fd.size()}"

def answer(queue):
    queue.put(refused())

def ask(queue):
    try:
        queue.put(fd.rank())
    except ValueError as error:
        queue.put(str(error))
"""

BEGIN = """
if __name__ == "__main__":
    fd.init()
    fd.barrier()
"""

END = """
    assert fd.allreduce(np.ones(2), op=fd.Sum)[0] == fd.size()
    print("fine", flush=True)
"""

CHILD = "import farandole as fd; fd.init()"

WAYS = {
    "subprocess": f"""
    child = subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True)
    assert child.returncode == 1
    print(child.stderr, flush=True)
""",
    "a shell between": f"""
    command = [sys.executable, "-c", {CHILD!r}]
    shell = ["sh", "-c", '"$@"; true', "sh"]
    child = subprocess.run([*shell, *command], capture_output=True, text=True)
    print(child.stderr, flush=True)
""",
    "spawn": """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=answer, args=(queue,))
    child.start()
    print(queue.get(timeout=60), flush=True)
    child.join()
""",
    "a fork after shutdown": """
    fd.shutdown()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=answer, args=(queue,))
    child.start()
    print(queue.get(timeout=60), flush=True)
    child.join()
    fd.init()
""",
}

FORKED = "a fork after shutdown"


def check(out, ranks, ways):
    """Each way's child was refused on each rank."""
    assert out.count("fine") == ranks, out
    forked = re.findall("refused: this process was forked .* Remedy", out)
    assert len(forked) == ranks * (FORKED in ways), out
    for rank in range(ranks):
        found = re.findall(rf"process \d+ is a child of rank {rank} \(process \d+\).*", out)
        assert len(found) == len(ways) - (FORKED in ways), out
        assert all("Remedy" in text and "__main__" in text for text in found)


# Without a launcher a child is a world of its own; another launcher makes ranks of its own.
OTHERS = f"""
    def without(*names):
        return {{k: v for k, v in os.environ.items() if not k.startswith(names)}}
    alone = "import farandole as fd; fd.init(); print('alone: %d' % fd.size())"
    bare = without("OMPI_", "PMIX_", "PMI_", "PRTE_")
    print(subprocess.check_output([sys.executable, "-c", alone], env=bare, text=True), flush=True)
    inner = "import farandole as fd; fd.init(); print('inner %d' % fd.size()); fd.shutdown()"
    if fd.rank() == 0:
        bare = without("OMPI_COMM", "PMIX_", "PRTE_")
        command = [{find_mpirun()!r}, "-np", "2", sys.executable, "-c", inner]
        print(subprocess.check_output(command, env=bare, text=True, timeout=60), flush=True)
    fd.barrier()
"""
# A forked child gets its rank's answer; a spawned one hears that it needs an argument.
ASKS = """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=ask, args=(queue,))
    child.start()
    print(f"rank {fd.rank()}: {queue.get()}", flush=True)
    child.join()
"""


def test_under_mpirun(mpi_ranks):
    source = HEAD + BEGIN + "".join(WAYS.values()) + OTHERS + ASKS * OPEN_MPI + END
    out = mpi_ranks(source, 2).finish().check().out
    check(out, 2, WAYS)
    assert out.count("alone: 1") == 2, out
    assert out.count("inner 2") == 2, out
    for rank in range(2 * OPEN_MPI):
        assert f"rank {rank}: farandole has not been initialized: call init() first; a " in out, out
    told = "that a rank has spawned is not a rank: pass rank() and size() to it"
    assert out.count(told) == 2 * OPEN_MPI


def test_without_mpi(fork_ranks):
    ways = ["subprocess", "spawn", FORKED]
    job = fork_ranks(HEAD + BEGIN + "".join(map(WAYS.get, ways)) + END, 2)
    assert [r.returncode for r in job.finish()] == [0, 0], job.output()
    check(job.output(), 2, ways)


def test_a_child_before_its_rank(mpi_ranks):
    """MPI is the user's, by import alone; a fork would speak in its parent's name."""
    source = (
        HEAD
        + """
if __name__ == "__main__":
    from mpi4py import MPI
"""
        + WAYS["a fork after shutdown"].replace("    fd.shutdown()\n", "")
        + END
    )
    result = mpi_ranks(source, 2).finish(60).check()
    assert result.out.count("refused: ") == 2, result.out
    assert result.out.count("fine") == 2


AGAIN = """
import os, sys
import farandole as fd
fd.init()
fd.barrier()
print(f"round {len(sys.argv)}", flush=True)
fd.shutdown()
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, sys.argv[0], "again"])
"""


def test_a_process_that_becomes_another_program(mpi_ranks):
    out = mpi_ranks(AGAIN, 2).finish(60).out
    assert out.count("round 1") == out.count("round 2") == 2, out


@once
def test_programs_one_after_the_other(mpi_ranks, tmp_path):
    """`mpirun bash -c 'python a.py; python b.py'`: b.py is no child of a.py."""
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import farandole as fd; fd.init(); fd.barrier(); print('one of %d' % fd.size())"
    )
    source = f"""
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, {str(inner)!r}], check=True)
"""
    # Over TCP: Open MPI's shared-memory files of both have one name, and mpirun may remove those of
    # the first program late.
    env = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    result = mpi_ranks(source, 2, env).finish(60).check()
    assert result.out.count("one of 2") == 4, result.out


WORKERS = """
import os, sys, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, workers, path):
    dist.init_process_group("farandole", f"file://{path}", rank=rank, world_size=workers)
    found = torch.tensor([2.0**rank])
    dist.all_reduce(found)
    sys.stdout.write(f"rank {rank}: {found.item():g}\\n")
    dist.destroy_process_group()

def job(how, workers):
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (workers, f"{folder}/store"), workers, start_method=how)

if __name__ == "__main__":
    torch.set_num_threads(1)
"""
THREE = '    job("fork", 3)\n'
OF_THREE = Counter({"rank 0: 7": 1, "rank 1: 7": 1, "rank 2: 7": 1})


def told(out):
    return Counter(re.findall(r"rank \d: \d", out))


def test_workers_of_the_only_process_of_mpirun_meet_in_their_store(mpi_ranks):
    """A launcher that knows one process knows nothing of its workers."""
    rest = '    job("fork", 1)\n    job("spawn", 2)\n'
    of_rest = Counter({"rank 0: 1": 1, "rank 0: 3": 1, "rank 1: 3": 1})
    out = mpi_ranks(WORKERS + THREE + rest, 1).finish().check().out
    assert told(out) == OF_THREE + of_rest, out


def test_workers_of_the_only_process_of_srun_meet_in_their_store(tmp_path):
    srun = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0"
    file = tmp_path / "workers.py"
    file.write_text(WORKERS + THREE)
    done = ended([sys.executable, file], **dict(word.split("=") for word in srun.split()))
    assert (done.returncode, told(done.stdout)) == (0, OF_THREE), done


def test_workers_of_two_processes_of_mpirun(mpi_ranks, tmp_path):
    """More than mpirun knows are a world for each process. Else each is in the job, and finalises
    MPI: multiprocessing ends it without atexit, which mpirun would take for a failure."""
    rest = f"""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    child = mp.get_context("fork").Process(target=work, args=(rank, 2, "{tmp_path}/store"))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    of_rest = Counter({"rank 0: 3": 1, "rank 1: 3": 1})
    out = mpi_ranks(WORKERS + THREE + rest * OPEN_MPI, 2).finish().check().out
    assert told(out) == OF_THREE + OF_THREE + (of_rest if OPEN_MPI else Counter()), out
