# SPDX-License-Identifier: Apache-2.0
"""Elastic training under ULFM: ranks die and join, and the others go on in a new world, in place.
The end has the same bits as that of an undisturbed run, and each sample counts once.

benchmarks/recovery.py kills more of them, at random times.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from farandole.observe import flight
from farandole.observe.explain import explain
from harness.mpirun import MpiJob, mpi_job
from harness.worlds import ULFM, WORLDS, check, ends

Start = Callable[..., MpiJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(when, ranks, **variables): the program, where ranks die when `when` is true."""
    with ExitStack() as stack:

        def start_(when: str, ranks: int = 4, tail: str = "main()", **env: str) -> MpiJob:
            return stack.enter_context(_job(tmp_path, when, ranks, tail, env))

        yield start_


def _job(folder: Path, when: str, ranks: int, tail: str, env: Mapping[str, str]):  # type: ignore[no-untyped-def]
    path = folder / "program.py"
    dies = f"def dies(place, state):\n    step, rank = state.steps, fd.rank()\n    if {when}:\n"
    path.write_text(f"{WORLDS}\n{dies}        die()\n\n{tail}\n")
    return mpi_job([sys.executable, str(path)], ranks, env, ULFM)


def test_one_after_the_other_until_one_is_left(start: Start, tmp_path: Path) -> None:
    """Each world has flight recorders of its own, which tell the story."""
    when = "place == 'step' and (state.world, step, rank) in ((1, 2, 3), (2, 5, 1), (3, 9, 0))"
    folder = tmp_path / "flight"
    result = start(when, FARANDOLE_FLIGHT_DIR=str(folder)).finish()
    check(result, 1, 4)
    story = [
        "world 2: 3 ranks go on from commit 2; of world 1 rank 3 died",
        "world 3: 2 ranks go on from commit 5; of world 2 rank 1 died",
        "world 4: 1 rank goes on from commit 9; of world 3 rank 0 died",
    ]
    for world, ranks, died in ((1, 4, 3), (2, 3, 1), (3, 2, 0), (4, 1, -1)):
        dumps = flight.read_dumps(folder / f"world-{world}" if world > 1 else folder)
        assert [page["world"] for page in dumps] == [world] * ranks
        told = explain(dumps)
        assert world == 4 or f"First: rank {died} died" in "\n".join(told)
        assert told[ranks + 1 :][: world - 1 + (world > 1)] == (
            ["How it came to this world:", *(f"  {line}" for line in story[: world - 1])]
            if world > 1
            else []
        )
    assert all(result.out.count(line) == 1 for line in story), result.out
    told = subprocess.run(
        [sys.executable, "-m", "farandole", "explain", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert [line[:21] for line in told.splitlines() if "ranks recorded" in line] == [
        "4 of 4 ranks recorded",
        "3 of 3 ranks recorded",
        "2 of 2 ranks recorded",
        "1 of 1 ranks recorded",
    ]


def test_deaths_in_the_middle_of_a_commit(start: Start) -> None:
    """Others may have that commit or not; those that have it give it to the others."""
    when = "place == 'commit' and (state.world, step, rank) in ((1, 5, 0), (2, 8, 2))"
    check(start(when).finish(), 2, 3)


def test_two_at_once(start: Start) -> None:
    """In one world, or in two if the survivors of the first were quick."""
    when = "place == 'step' and rank in (0, 2) and step == 4 and state.world == 1"
    check(start(when).finish(), 2)


@pytest.mark.parametrize(("in_reset", "in_sync"), [(0, 1), (2, 0)])
def test_deaths_during_recovery(start: Start, in_reset: int, in_sync: int) -> None:
    """Of a rank of the second world, and, while the others copy rank 0's state, of the third."""
    when = f"""(place, state.world, rank) in (
        ('reset', 2, {in_reset}), ('sync', 3, {in_sync})) or (
        place == 'step' and (state.world, step, rank) == (1, 3, 1))"""
    check(start(when).finish(), 1, 4)


def test_deaths_at_the_end(start: Start) -> None:
    """When some have finished, all others learn of it; the program goes on after training."""
    when = "place == 'end' and rank in (0, 2) and state.world == 1"
    check(start(when).finish(), 2)


def test_no_rank_dies(start: Start) -> None:
    check(start("False", 3).finish(), 3, 1)


# ---- ranks that join


def test_a_new_rank_in_place_of_a_dead_one(start: Start) -> None:
    when = "place == 'step' and rank == 1 and step == 3 and first('1')"
    result = start(when, FARANDOLE_MAX_NP="4", SIZES='{"8": 4}').finish()
    check(result, 4, 3)
    assert ends(result.out)[0][2][:4] == [4, 4, 4, 3]
    assert ends(result.out)[0][2][8:] == [4, 4, 4, 4]


GROWS_AND_SHRINKS = """place == 'step' and step == 7 and fd.size() == 4 and (
        os.environ.update(FARANDOLE_MAX_NP='2') or rank in (1, 3))"""


def test_from_two_to_four_and_back(start: Start) -> None:
    result = start(GROWS_AND_SHRINKS, 2, FARANDOLE_MAX_NP="4", SIZES='{"5": 4}').finish()
    check(result, 2)
    sizes = ends(result.out)[0][2]
    assert sizes[0] == 2
    assert sizes[5:7] == [4, 4]
    assert sizes[7:] == [2] * 5


@pytest.mark.parametrize("place", ["step", "sync", "reset"])
def test_the_new_rank_dies(start: Start, place: str) -> None:
    """And another one comes. It is the last rank of the world."""
    when = f"place == {place!r} and rank == 2 and state.world == 2 and first('1')"
    result = start(when, 2, FARANDOLE_MAX_NP="3", SIZES='{"6": 3, "11": 3}').finish()
    check(result, 3)
    assert result.out.count("; 1 rank joined") == 2, result.out


def test_rank_0_dies_while_a_new_one_is_on_its_way(start: Start) -> None:
    """The new one learns of it and ends; the next rank 0 starts another one."""
    when = "place == 'step' and rank == 0 and step == 1 and first('1')"
    result = start(when, 2, FARANDOLE_MAX_NP="2", SIZES='{"9": 2}').finish()
    check(result, 2)


# ---- what is not tried again


def test_an_error_of_the_program_ends_all(start: Start) -> None:
    """After a death too: the survivors do not go on without the rank that has failed."""
    when = """place == 'step' and step == 4 and rank == 1 and state.world == 1 and first('1'):
        die()
    if place == 'step' and step == 6 and rank == 0:
        raise ValueError('bad data')
    if False"""
    result = start(when, 3).finish()
    assert result.returncode != 0
    assert "rank 0 left: ValueError: bad data" in result.out, result.out
    assert not ends(result.out)


def test_too_few_are_left(start: Start) -> None:
    when = "place == 'step' and rank == 1 and step == 3"
    result = start(when, 3, FARANDOLE_MIN_NP="3").finish()
    assert "PeerError: 2 ranks left, of FARANDOLE_MIN_NP=3: rank 1 has died" in result.out
    assert not ends(result.out)


def test_a_rank_that_is_stopped_is_named(start: Start) -> None:
    """It lives, so that nobody goes on without it; the job ends, and does not wait for it."""
    when = """place == 'step' and step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if False"""
    env = {"FARANDOLE_STALL_ABORT": "2", "FARANDOLE_INIT_TIMEOUT": "3"}
    result = start(when, 3, **env).finish()
    assert result.returncode != 0
    assert "StallError: elastic training: rank 1 did not come within 3 s" in result.out, result.out


# ---- torch

TORCH = """
import json, os, signal, sys
import torch
import farandole.torch as hvd

torch.set_num_threads(1)
hvd.init()
data = torch.arange(50.0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data, even=False)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0, seen=[])

@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        loader = torch.utils.data.DataLoader(data, 2, sampler=state.sampler)
        for i, batch in enumerate(loader):
            if (hvd.rank(), state.steps, state.world) in ((0, 3, 1), (2, 7, 2)):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(batch[:, None]).pow(2).mean().backward()
            optimizer.step()
            state.sampler.record_batch(i, len(batch))
            state.seen = [*state.seen, *hvd.allgather(batch, name="batch").tolist()]
            state.steps += 1
            if state.steps % 2 == 0:
                state.commit()
        last = hvd.join()  # who has made the last step
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()

train(state)
weights = [model.weight.item().hex(), model.bias.item().hex()]
same = hvd.allgather_object(weights)
assert all(each == same[0] for each in same), same
if hvd.rank() == 0:
    print("seen " + json.dumps([hvd.size(), state.seen]), flush=True)
"""


def test_a_sampler_gives_each_sample_once(tmp_path: Path) -> None:
    """4, then 3, then 2 ranks, of which some have one batch more than others."""
    path = tmp_path / "program.py"
    path.write_text(TORCH)
    with mpi_job([sys.executable, str(path)], 4, mpi_args=ULFM) as job:
        out = job.finish().check().out
    ranks, seen = json.loads(re.search(r"^seen (.*)$", out, re.MULTILINE)[1])
    assert ranks == 2
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
