# SPDX-License-Identifier: Apache-2.0
"""init, shutdown and init again in a living MPI; worlds smaller than the job."""

import os
import socket
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import farandole as fd

WORLD = MPI.COMM_WORLD


def check():
    result = fd.allreduce(np.full(5, fd.rank() + 1.0), op=fd.Sum)
    assert result.tolist() == [fd.size() * (fd.size() + 1) / 2] * 5


@pytest.fixture
def _down():
    """The test starts and ends with the runtime down."""
    fd.shutdown()
    yield
    fd.shutdown()
    WORLD.Barrier()
    fd.init()


def test_topology():
    assert (fd.rank(), fd.size()) == (WORLD.Get_rank(), WORLD.Get_size())
    hosts = WORLD.allgather(socket.gethostname())
    own, names = hosts[fd.rank()], list(dict.fromkeys(hosts))
    local = hosts[: fd.rank()].count(own)
    assert (fd.local_rank(), fd.local_size()) == (local, hosts.count(own))
    alike = [name for name in names if hosts.count(name) > local]
    assert (fd.cross_rank(), fd.cross_size()) == (alike.index(own), len(alike))
    assert fd.is_homogeneous() == (len({hosts.count(name) for name in names}) == 1)
    assert fd.mpi_enabled()
    assert fd.mpi_threads_supported() == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)


@pytest.mark.usefixtures("_down")
def test_again_and_again():
    for _ in range(5):
        fd.init()
        fd.init()
        assert fd.is_initialized()
        check()
        fd.shutdown()
        fd.shutdown()
        assert not fd.is_initialized()


@pytest.mark.usefixtures("_down")
def test_before_init():
    for question in (fd.rank, fd.size, fd.local_rank, fd.cross_size, fd.is_homogeneous):
        with pytest.raises(ValueError, match="init"):
            question()
    with pytest.raises(fd.ShutdownError, match="init"):
        fd.allreduce(np.ones(3))
    with pytest.raises(fd.ShutdownError, match="init"):
        fd.barrier()


@pytest.mark.usefixtures("_down")
def test_the_tuning_file_and_the_settings_of_rank_0_hold_for_the_job(monkeypatch, tmp_path):
    path = tmp_path / "tuning.conf"
    path.write_text(f"FARANDOLE_BLOCK_BYTES = {64 + WORLD.Get_rank()}K\n")
    monkeypatch.setenv("FARANDOLE_TUNING", str(path))
    monkeypatch.setenv("FARANDOLE_STALL_WARN", str(20 + WORLD.Get_rank()))
    fd.init()
    rows = {v.name: (v.value, v.source) for v in fd.config()}
    source = "tuning file" if fd.rank() == 0 else "rank 0"
    assert rows["FARANDOLE_BLOCK_BYTES"] == (str(64 << 10), source)
    assert float(rows["FARANDOLE_STALL_WARN"][0]) == 20
    check()


def test_work_in_flight_ends_with_shutdown():
    handle = fd.allreduce_async(np.ones(3), name=f"of rank {fd.rank()}")
    done = fd.size() == 1
    fd.shutdown()
    if not done:
        with pytest.raises((fd.ShutdownError, fd.PeerError)):
            handle.wait()
    fd.init()
    check()


@pytest.mark.ranks(2, 3, 4)
def test_old_handles_are_not_taken_for_new_ones():
    old = fd.allreduce_async(np.ones(3), name=f"of rank {fd.rank()}")
    dropped = fd.allreduce_async(np.ones(3), name=f"dropped by rank {fd.rank()}")
    fd.shutdown()
    fd.init()
    new = [fd.allreduce_async(np.full(3, i), op=fd.Sum, name=f"new {i}") for i in range(5)]
    del dropped
    check()
    assert old.poll()
    with pytest.raises(fd.ShutdownError, match="of rank"):
        old.wait()
    for i, handle in enumerate(new):
        assert handle.wait().tolist() == [i * fd.size()] * 3


def test_results_outlive_shutdown():
    gathered = fd.allgather(np.full((2, 3), fd.rank()))
    handle = fd.allreduce_async(np.ones(4), op=fd.Sum)
    reduced = handle.wait()
    fd.shutdown()
    assert gathered[:, 0].tolist() == [r for r in range(WORLD.Get_size()) for _ in "ab"]
    assert reduced.tolist() == handle.wait().tolist() == [WORLD.Get_size()] * 4
    fd.init()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("how", ["ranks", "communicator", "everyone"])
@pytest.mark.usefixtures("_down")
def test_init_with(how):
    rank, size = WORLD.Get_rank(), WORLD.Get_size()
    half = WORLD.Split(rank % 2)
    comm = {"ranks": list(range(1, size)), "communicator": half, "everyone": []}[how]
    if how == "ranks" and rank == 0:
        with pytest.raises(ValueError, match="rank 0 is not in"):
            fd.init(comm=comm)
        assert not fd.is_initialized()
        return
    fd.init(comm=comm)
    wanted = {"ranks": (rank - 1, size - 1), "everyone": (rank, size)}
    assert (fd.rank(), fd.size()) == wanted.get(how, (half.Get_rank(), half.Get_size()))
    half.Free()  # farandole has a duplicate
    check()


@pytest.mark.parametrize("ranks", [[0, 0], [0, 99], [-1, 0]])
@pytest.mark.usefixtures("_down")
def test_init_with_wrong_ranks(ranks):
    with pytest.raises(ValueError, match="distinct ranks"):
        fd.init(comm=ranks)


class Odd(Exception):
    """Takes no text, and the other ranks do not know it."""

    def __init__(self, a, b):
        super().__init__(a, b)


def odd():
    raise Odd(1, lambda: 2)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("what", ["setting", "warning", "class"])
@pytest.mark.usefixtures("_down")
def test_what_one_rank_raises_all_ranks_raise(monkeypatch, what):
    error, text = ValueError, r"rank 1: .*FARANDOLE_STALL_WARN"
    with warnings.catch_warnings():
        if what == "warning":
            error, text = Warning, "RuntimeWarning: the launcher has bound"
            warnings.simplefilter("error")
        if what == "class":
            error, text = fd.FarandoleError, "rank 1: Odd"
        if WORLD.Get_rank() == 1 or what == "warning":
            if what == "setting":
                monkeypatch.setenv("FARANDOLE_STALL_WARN", "soon")
            elif what == "class":
                monkeypatch.setattr("farandole.observe.stacks.install", odd)
            else:
                monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
                monkeypatch.setattr(os, "cpu_count", lambda: 64)
        with pytest.raises(error, match=text):
            fd.init()
    assert not fd.is_initialized()
    monkeypatch.undo()
    fd.init()
    check()


@pytest.mark.usefixtures("_down")
def test_a_background_thread_in_real_time(monkeypatch, capfd):
    monkeypatch.setenv("FARANDOLE_PRIORITY", "realtime")
    fd.init()
    check()
    fd.barrier()
    threads = [
        t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text() == "farandole\n"
    ]
    policies = {os.sched_getscheduler(int(t.name)) & ~os.SCHED_RESET_ON_FORK for t in threads}
    refused = "FARANDOLE_PRIORITY=realtime is not permitted here" in capfd.readouterr().err
    assert policies == {os.SCHED_OTHER if refused else os.SCHED_RR}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # the program's own thread keeps its policy


def last() -> int:
    return WORLD.Get_size() - 1


WRONG_SETS = {
    "a rank too many": (lambda: [fd.ProcessSet([0]), fd.ProcessSet([0, 99])], "99"),
    "the same set twice": (lambda: [fd.ProcessSet([0]), fd.ProcessSet([0])], "twice"),
    "a registered one": (lambda: [fd.ProcessSet([0]), fd.global_process_set], "registered already"),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wrong", WRONG_SETS)
@pytest.mark.usefixtures("_down")
def test_init_with_wrong_sets_leaves_nothing(wrong):
    make, text = WRONG_SETS[wrong]
    sets = make()
    with pytest.raises(ValueError, match=text):
        fd.init(process_sets=sets)
    assert not fd.is_initialized()
    assert sets[0].process_set_id is None
    with pytest.raises(ValueError, match="init"):
        fd.rank()
    fd.init(process_sets=[sets[0]])
    assert fd.size() == WORLD.Get_size()
    assert sets[0].process_set_id is not None
    check()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "theirs",
    [
        lambda: [fd.ProcessSet([0])],
        lambda: [fd.ProcessSet([0, 99])],
        lambda: [3],
        lambda: 3,
        lambda: "static",
    ],
)
@pytest.mark.usefixtures("_down")
def test_init_with_wrong_sets_on_one_rank(theirs):
    """All ranks raise, none is initialised, and all may try again."""
    sets = theirs() if WORLD.Get_rank() == last() else [fd.ProcessSet([0, 1])]
    with pytest.raises((ValueError, TypeError, fd.FarandoleError)):
        fd.init(process_sets=sets)
    assert not fd.is_initialized()
    fd.init()
    check()


@pytest.mark.ranks(3, 4)
@pytest.mark.usefixtures("_down")
def test_a_communicator_of_outsiders_on_one_rank():
    """Only this rank can see it; the others would wait for it in the middle of the registration."""
    pair = WORLD.Split(int(WORLD.Get_rank() < 2), WORLD.Get_rank())
    if WORLD.Get_rank() < 2:
        comm = pair if WORLD.Get_rank() == 0 else WORLD
        with pytest.raises(
            ValueError, match="rank 1: ValueError: the communicator holds processes"
        ):
            fd.init(comm=[0, 1], process_sets=[fd.ProcessSet(comm)])
        assert not fd.is_initialized()
        fd.init(comm=[0, 1])
        check()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("_down")
def test_a_rank_that_waits_in_shutdown_gives_up_in_the_end(monkeypatch):
    """All hear whom it waited for: the ranks that have not left."""
    monkeypatch.setenv("FARANDOLE_SHUTDOWN_TIMEOUT", "0.3")
    fd.init()
    stay = f"for rank(s 0.*{last() - 1}|s 0, {last() - 1}| 0) to leave"
    if fd.rank() == last():
        with pytest.raises(fd.StallError, match=stay):
            fd.shutdown()
        assert not fd.is_initialized()
        WORLD.Barrier()
    else:
        WORLD.Barrier()
        with pytest.raises(fd.StallError, match=stay):
            fd.allreduce(np.ones(1))
        fd.shutdown()
