# SPDX-License-Identifier: Apache-2.0
"""Subsets of ranks that work on their own: overlapping, from lists and from communicators."""

import re

import numpy as np
import pytest
from mpi4py import MPI

import farandole as fd
from farandole import process_sets


def registered(*sets):
    return [fd.add_process_set(ranks) for ranks in sets]


def remove(sets):
    fd.barrier()
    for process_set in sets:
        assert fd.remove_process_set(process_set)


def test_the_world():
    world = fd.global_process_set
    assert (world.size(), world.rank(), world.included()) == (fd.size(), fd.rank(), True)
    assert not fd.remove_process_set(world)
    assert fd.allreduce(np.ones(2), op=fd.Sum, process_set=world).tolist() == [fd.size()] * 2


@pytest.mark.ranks(2, 3, 4)
def test_every_collective_in_a_set():
    members = list(range(1, fd.size()))
    (ps,) = registered(members)
    assert ps.ranks == members
    assert ps.size() == len(members)
    assert ps.included() == (fd.rank() in members)
    if ps.included():
        n, place = ps.size(), ps.rank()
        assert place == fd.rank() - 1
        x = np.full((n, 2), float(fd.rank()))
        total = float(sum(members))
        assert fd.allreduce(x, op=fd.Sum, process_set=ps).tolist() == [[total] * 2] * n
        assert fd.allreduce(x, process_set=ps).tolist() == [[total / n] * 2] * n
        assert fd.broadcast(x, fd.size() - 1, process_set=ps).tolist() == [[members[-1]] * 2] * n
        gathered = fd.allgather(x[:1], process_set=ps)
        assert gathered[:, 0].tolist() == members
        assert fd.reducescatter(x, op=fd.Sum, process_set=ps).tolist() == [[total] * 2]
        assert fd.alltoall(x, process_set=ps)[:, 0].tolist() == members
        fd.barrier(ps)
        results = fd.grouped_allreduce([x, x[0].copy()], op=fd.Max, name="g", process_set=ps)
        assert results[1].tolist() == [members[-1]] * 2
        with pytest.raises(ValueError, match="0"):
            fd.broadcast(x, 0, process_set=ps)
    else:
        with pytest.raises(ValueError, match="rank 0 is not in"):
            ps.rank()
        with pytest.raises(ValueError, match="process set"):
            fd.allreduce(np.ones(2), process_set=ps)
    remove([ps])


@pytest.mark.ranks(3, 4)
def test_sets_overlap_and_names_are_their_own():
    sets = registered([0, 1], [1, 2], [0, 2])
    handles = []
    for i, ps in enumerate(sets):
        if ps.included():
            x = np.full(1000, fd.rank() + 10.0 * i)
            handles.append((ps, i, fd.allreduce_async(x, op=fd.Sum, name="same", process_set=ps)))
    everyone = fd.allreduce_async(np.ones(3), op=fd.Sum, name="same")
    for ps, i, handle in reversed(handles):
        assert handle.wait()[-1] == sum(ps.ranks) + 20.0 * i
    assert everyone.wait()[0] == fd.size()
    remove(sets)


@pytest.mark.ranks(2, 4)
def test_a_set_does_not_wait_for_another():
    half = fd.size() // 2
    low, high = registered(list(range(half)), list(range(half, fd.size())))
    if low.included():
        for i in range(20):
            assert fd.allreduce(np.ones(2), op=fd.Sum, process_set=low)[0] == half, i
    MPI.COMM_WORLD.Barrier()  # nobody of `high` has called before this
    if high.included():
        assert fd.allreduce(np.ones(2), op=fd.Sum, process_set=high)[0] == half
    remove([low, high])


@pytest.mark.ranks(2)
def test_a_set_of_a_communicator_exists():
    """All ranks get the error, and no rank keeps the sets that were added before."""
    comm = MPI.COMM_WORLD.Split(fd.rank())
    ps, other = fd.ProcessSet(comm), fd.add_process_set([1])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"of rank 1 exists already"):
            fd.add_process_set(ps)
    assert ps.process_set_id is None
    fd.remove_process_set(other)
    fd.add_process_set(ps)
    mine = np.full(3, 1.0 + fd.rank())
    assert fd.allreduce(mine, op=fd.Sum, process_set=ps).tolist() == mine.tolist()
    comm.Free()
    fd.shutdown()
    fd.init()


@pytest.mark.ranks(3)
def test_ctrl_c_between_a_set_and_its_number(monkeypatch: pytest.MonkeyPatch):
    class Interrupted(list[fd.ProcessSet]):
        def append(self, value: fd.ProcessSet) -> None:
            raise KeyboardInterrupt

    ps = fd.ProcessSet([0, 1])
    with monkeypatch.context() as patched:
        patched.setattr(process_sets, "registered", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            fd.add_process_set(ps)
        fd.shutdown()
    fd.init()
    fd.add_process_set(ps)
    fd.remove_process_set(ps)


@pytest.mark.ranks(2, 4)
def test_sets_from_a_communicator():
    comm = MPI.COMM_WORLD.Split(fd.rank() % 2)
    ps = fd.add_process_set(fd.ProcessSet(comm))
    assert ps.ranks == list(range(fd.rank() % 2, fd.size(), 2))
    x = fd.allreduce(np.full(3, fd.rank()), op=fd.Sum, process_set=ps)
    assert x.tolist() == [sum(ps.ranks)] * 3
    comm.Free()
    fd.shutdown()
    assert ps.process_set_id is None
    fd.init()


@pytest.mark.ranks(2, 3, 4)
def test_wrong_sets():
    (ps,) = registered([1])
    for twice in ([1], range(fd.size())):
        with pytest.raises(ValueError, match="exists already"):
            fd.add_process_set(twice)
    with pytest.raises(ValueError, match="registered already"):
        fd.add_process_set(ps)
    with pytest.raises(ValueError, match=r"distinct ranks between 0 and .*; got ranks 0, 99"):
        fd.add_process_set([0, 99])
    for outside in ([-1], [0, 1 << 40]):
        named = re.escape(str(outside))
        with pytest.raises(ValueError, match=rf"ranks must be from 0 to size\(\) - 1, not {named}"):
            fd.add_process_set(outside)
    with pytest.raises(ValueError, match=r"not \[-7\]"):  # of some rank, by all
        fd.add_process_set([-7] if fd.rank() == 0 else [0, 1])
    with pytest.raises(fd.MismatchError, match=r"\(0,\).*\(1,\)|\(1,\).*\(0,\)"):
        fd.add_process_set([0 if fd.rank() == 0 else 1])
    remove([ps])
    assert ps.process_set_id is None
    assert ps.size() is ps.rank() is None
    assert not fd.remove_process_set(ps)
    assert not fd.remove_process_set(fd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        fd.allreduce(np.ones(2), process_set=ps)


@pytest.mark.ranks(2, 3, 4)
def test_ids_are_not_used_again():
    (first,) = registered([0])
    number = first.process_set_id
    remove([first])
    (second,) = registered([0])
    assert second.process_set_id != number
    remove([second])


@pytest.mark.ranks(3, 4)
def test_sets_given_to_init():
    fd.shutdown()
    pair, own = fd.ProcessSet([0, 1]), fd.ProcessSet([0])
    fd.init(process_sets=[pair, own])
    if pair.included():
        assert fd.allreduce(np.ones(2), op=fd.Sum, process_set=pair)[0] == 2
    if own.included():
        assert fd.allreduce(np.ones(2), op=fd.Sum, process_set=own)[0] == 1
    fd.shutdown()
    with pytest.raises(ValueError, match="twice"):
        fd.init(process_sets=[fd.ProcessSet([0, 1]), fd.ProcessSet([1, 0])])
    with pytest.raises(ValueError, match="rank 1 passes"):
        fd.init(process_sets=[fd.ProcessSet([0])] if MPI.COMM_WORLD.Get_rank() == 0 else [])
    fd.init(process_sets="dynamic")
    remove(registered([0, 1]))


@pytest.mark.ranks(3, 4)
def test_join_in_a_set():
    (ps,) = registered([0, 2])
    if ps.included():
        for _ in range(fd.rank()):
            fd.allreduce(np.ones(3), op=fd.Sum, name="uneven", process_set=ps)
        assert fd.join(process_set=ps) == 2
    remove([ps])
