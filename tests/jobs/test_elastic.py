# SPDX-License-Identifier: Apache-2.0
"""`farandole run --elastic` on one machine: ranks die and join, and the others go on in a new
world, in place, with the same bits at the end. What is not tried again. tests/hosts loses hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.observe import flight
from farandole.observe.explain import explain
from harness.supervised import SupervisedJob, story
from harness.worlds import WORLDS, check, ends, training, undisturbed, worlds

Start = Callable[..., SupervisedJob]
EACH = {"FARANDOLE_CHECKPOINT_SECONDS": "0"}  # each commit is written
DIES = "if fd.rank() == {victim} and state.steps == {step} and first('died'): {end}"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
ALONE = ("--min-np", "1")  # survivors go on at once
NOBODY = "signal.pause()"  # whoever is started later never joins


# ---- deaths


@pytest.mark.parametrize(("ranks", "victim", "step"), [(1, 0, 5), (2, 1, 11), (3, 0, 7)])
def test_a_killed_rank(
    elastic_ranks: Start, tmp_path: Path, ranks: int, victim: int, step: int
) -> None:
    """By default survivors wait for the one in its place, and so the bits are the same."""
    source = training(DIES.format(victim=victim, step=step, end=KILLED))
    result = elastic_ranks(source, ranks, **EACH).finish().check()
    check(result.out, ranks)
    told = story(result.out)
    assert told[0] == f"world 1: {ranks} rank{'s' * (ranks > 1)}"
    assert told[1] == f"rank {victim} was killed by SIGKILL"
    assert re.match(rf"world 2: {ranks} ranks? from commit {step}", told[2])
    assert ("on the disk" in told[2]) == (ranks == 1), "survivors have it in memory"
    assert told[3:] == ["the job has finished in 2 worlds"]
    assert result.out.count("reset on") == ranks, "callbacks run once on each rank"
    assert not list(tmp_path.glob("elastic-*")), "its own folder goes when all is well"


def test_one_after_the_other_until_one_is_left(elastic_ranks: Start, tmp_path: Path) -> None:
    """Each world has flight recorders of its own, which tell the story."""
    when = "place == 'step' and (state.world, step, rank) in ((1, 2, 3), (2, 5, 1), (3, 9, 0))"
    folder = tmp_path / "flight"
    source = worlds(when, joins=NOBODY)
    result = elastic_ranks(source, 4, *ALONE, FARANDOLE_FLIGHT_DIR=str(folder)).finish().check()
    check(result.out, 1, 4)
    told = [
        "world 2: 3 ranks go on from commit 2; rank 3 of world 1 is gone",
        "world 3: 2 ranks go on from commit 5; rank 1 of world 2 is gone",
        "world 4: 1 rank goes on from commit 9; rank 0 of world 3 is gone",
    ]
    for world, ranks in ((1, 4), (2, 3), (3, 2), (4, 1)):
        dumps = flight.read_dumps(folder / f"world-{world}" if world > 1 else folder)
        assert [page["world"] for page in dumps] == [world] * ranks
        lines = explain(dumps)[ranks + 1 :]
        assert lines[: world - 1 + (world > 1)] == (
            ["History of this world:", *(f"  {line}" for line in told[: world - 1])]
            if world > 1
            else []
        )
    command = [sys.executable, "-m", "farandole", "explain", str(folder)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.findall(r"^(\d) of \d ranks recorded", said, re.MULTILINE) == ["4", "3", "2", "1"]


def test_deaths_during_recovery(elastic_ranks: Start) -> None:
    """Rank 0 of the second world dies, then that of the third, while the others copy its state."""
    when = """(place, state.world, rank) in (('reset', 2, 0), ('sync', 3, 0)) or (
        place == 'step' and (state.world, step, rank) == (1, 3, 1))"""
    check(elastic_ranks(worlds(when, joins=NOBODY), 4, *ALONE).finish().check().out, 1, 4)


@pytest.mark.parametrize("turn", [1, 5])
def test_a_rank_dies_in_the_first_init(elastic_ranks: Start, turn: int) -> None:
    """The other one's init() goes on with the next one: its process stays."""
    dies = f"""
import os, signal
from farandole.start.agent_client import AgentClient
print("starts", flush=True)
exchange = AgentClient.exchange
def dies(self, world, turn, *rest):
    if world.number == 1 and turn == {turn} and world.members.index(self._member.name) == 1:
        {KILLED}
    return exchange(self, world, turn, *rest)
AgentClient.exchange = dies
"""
    out = elastic_ranks(dies + training(), 2).finish().check().out
    assert "this rank meets the others again" in out
    assert "world 2: 2 ranks\n" in out
    assert out.count("starts") == 3
    check(out, 2)


def test_ranks_that_end_with_0_in_the_middle(elastic_ranks: Start) -> None:
    """Nobody has said that it is done. All are lost, and begin with the commit on the disk."""
    source = training("if state.steps == 4 and first(str(fd.rank())): os._exit(0)")
    out = elastic_ranks(source, 2, **EACH).finish().check().out
    assert out.count("ended with exit code 0, without saying why") == 2
    assert re.search("world 2: 2 ranks from commit 4 on the disk", out)
    check(out, 2)


def test_a_library_error_is_tried_again(elastic_ranks: Start) -> None:
    """Outside of train() too, which tries it again by itself."""
    event = (
        "if state.steps == 12 and first(str(fd.rank())): raise fd.LibraryError('a broken cable')"
    )
    source = training().replace("    train(state)\n", f"    train(state)\n    {event}\n")
    out = elastic_ranks(source, 2).finish().check().out
    assert "a broken cable" in out
    assert "world 2: 2 ranks" in out
    check(out, 2)


def test_a_program_that_always_dies(elastic_ranks: Start) -> None:
    source = training().replace("fd.init()\n", f"fd.init()\n{KILLED}\n")
    result = elastic_ranks(source, 2, "--restarts", "2").finish()
    assert result.returncode == 1
    assert re.search("[67] failures without a commit: giving up", result.out)


def test_each_commit_gives_new_restarts(elastic_ranks: Start) -> None:
    end = f"if state.steps % 2 == 0 and fd.rank() == 1 and first(f'at {{state.steps}}'): {KILLED}"
    out = elastic_ranks(training(end), 2, "--restarts", "0").finish().check().out
    assert "world 7:" in out
    check(out, 2)


# ---- joins


def test_a_new_rank_in_place_of_a_dead_one(elastic_ranks: Start) -> None:
    """Nobody waits for it: it joins at a later commit."""
    when = "place == 'step' and rank == 1 and step == 3 and first('1')"
    result = elastic_ranks(worlds(when), 4, *ALONE, SIZES='{"8": 4}').finish().check()
    check(result.out, 4, 3)
    sizes = ends(result.out)[0][2]
    assert (sizes[:4], sizes[8:]) == ([4, 4, 4, 3], [4] * 4)
    assert re.search("world 3: 4 ranks from commit [4-9]$", result.out, re.MULTILINE)


GROWS = """
dies_ = dies
def dies(place, state):
    dies_(place, state)
    wanted = {2: "localhost:4", 7: "localhost:2"}.get(state.steps)
    if place == "step" and wanted:  # in the middle of an epoch
        (FOLDER / f"new-{fd.rank()}").write_text(wanted)
        os.replace(FOLDER / f"new-{fd.rank()}", FOLDER / "hosts")
        while fd.size() != int(wanted[-1]):
            state.check_host_updates()
"""


def test_hosts_that_come_and_go(elastic_ranks: Start, tmp_path: Path) -> None:
    """Two ranks, then four, then two."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    options = ("--host-discovery-script", f"cat {tmp_path}/hosts", *ALONE)
    result = elastic_ranks(worlds(late=GROWS), 0, *options).finish().check()
    check(result.out, 2)
    assert ends(result.out)[0][2] == [2] * 2 + [4] * 5 + [2] * 5


def test_a_script_that_fails_for_a_time(elastic_ranks: Start, tmp_path: Path) -> None:
    """What it said last holds; nothing is started before it has said anything."""
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho 'no such cluster' >&2\nexit 3\n")
    script.chmod(0o755)
    event = (
        "if state.steps == 5 and fd.rank() == 0: (FOLDER / 'nonsense').touch()\n    "
        "while state.steps == 5 and not (FOLDER / 'asked').exists(): time.sleep(0.01)"
    )
    job = elastic_ranks(training(event), 2, "--host-discovery-script", str(script))
    job.process.wait_for_output("ended with 3: no such cluster; the hosts stay as they were: none")
    new = tmp_path / "new"
    new.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n[ ! -e nonsense ] && echo localhost:2 && exit\n"
        "echo '<html>502 Bad Gateway</html>'; touch asked\n"
    )
    new.chmod(0o755)
    new.replace(script)
    result = job.finish().check()
    assert "'<html>502 Bad Gateway</html>' is not a host" in result.out
    assert "world 2" not in result.out
    check(result.out, 2)


def test_hosts_that_never_come(elastic_ranks: Start) -> None:
    options = ("--host-discovery-script", "true", "--elastic-timeout", "0.5")
    result = elastic_ranks(training(), 2, *options).finish()
    assert result.returncode == 1
    assert "0.5 s (--elastic-timeout) without hosts for 2 ranks" in result.out
    assert "world 1" not in result.out


# ---- what is not tried again


PROGRAMS_OWN = {
    "ValueError": ("raise ValueError('bad data')", "failed: ValueError: bad data", 1),
    "MismatchError": ("fd.allreduce(np.ones(2 + fd.rank()), name='m')", "failed: MismatchError", 1),
    "exit code": ("sys.exit(7)", r"failed: sys\.exit\(7\)", 7),
}


@pytest.mark.parametrize("how", PROGRAMS_OWN)
def test_the_programs_own_errors_are_not_tried_again(elastic_ranks: Start, how: str) -> None:
    action, text, code = PROGRAMS_OWN[how]
    result = elastic_ranks(training(f"if state.steps == 3: {action}"), 2).finish()
    assert result.returncode == code, result.out
    assert any(re.match(rf"rank \d {text}", line) for line in story(result.out)), result.out
    assert "world 2" not in result.out


def test_an_error_of_the_program_after_a_death(elastic_ranks: Start) -> None:
    """The survivors do not go on without the rank that has failed."""
    late = """
dies_ = dies
def dies(place, state):
    dies_(place, state)
    if place == "step" and state.steps == 6 and fd.rank() == 0:
        raise ValueError("bad data")
"""
    when = "place == 'step' and step == 4 and rank == 1 and first('1')"
    result = elastic_ranks(worlds(when, late, NOBODY), 3, *ALONE).finish()
    assert result.returncode == 1
    assert "rank 0 failed: ValueError: bad data" in story(result.out)
    assert not ends(result.out)


@pytest.mark.parametrize(
    ("source", "code"), [("import no_such_module\n", 1), ("'nothing to do'", 0)]
)
def test_an_end_before_init_is_not_tried_again(
    elastic_ranks: Start, source: str, code: int
) -> None:
    result = elastic_ranks(source, 2).finish()
    assert result.returncode == code, result.out
    text = (
        f"ended with exit code {code} before it had called init()" if code else "nothing was done"
    )
    assert text in result.out
    assert "world 1" not in result.out


# ---- programs


def test_two_trainings_in_one_program(elastic_ranks: Start) -> None:
    """Each continues from its own commits, though their states have the same names. New ranks can't
    start with the second: all restart."""
    source = WORLDS.replace("def main():\n", "def train_once():\n")
    source += """
def event(state):
    if state.steps == 10 and len(ended) == 1 and fd.rank() == 1 and first("died"):
        os.kill(os.getpid(), signal.SIGKILL)

ended = []
train_once()
ended.append(1)
state = Doomed(epoch=0, counted=0, seen=[], weights=np.ones(5), steps=0, sizes=[])
train_once()
"""
    out = elastic_ranks(source, 2, **EACH).finish().check().out
    assert "on the disk" in out
    sizes = ",".join(["2"] * 12)
    found = re.findall(r"rank 0 of 2 in world \d+, (.*): (.*)", out)
    assert set(found) == {(sizes, undisturbed())}


def test_programs_in_turn(elastic_ranks: Start, tmp_path: Path) -> None:
    """`bash -c 'python a.py; python b.py'`: each is a rank in its turn."""
    (tmp_path / "b.py").write_text(training(DIES.format(victim=1, step=9, end=KILLED)))
    source = f"""
import os, sys
if sys.argv[1:]:
    import farandole as fd
    fd.init()
    print("a", fd.rank())
else:
    line = "{{0}} {{1}} a && {{0}} {tmp_path}/b.py".format(sys.executable, __file__)
    os.execvp("bash", ["bash", "-c", line])
"""
    out = elastic_ranks(source, 2).finish().check().out
    assert out.count("a 1") >= 1
    check(out, 2)


def test_a_childs_signal_is_its_own(elastic_ranks: Start) -> None:
    """multiprocessing ends its workers by SIGTERM, which a forked rank's handler would swallow."""
    event = """
    if state.steps == 5:
        import multiprocessing
        mine, its = multiprocessing.Pipe()
        def waits():
            its.send("here")
            signal.pause()
        child = multiprocessing.get_context("fork").Process(target=waits)
        child.start()
        mine.recv()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM, child.exitcode
"""
    out = elastic_ranks(training(event), 2).finish().check().out
    assert "got SIGTERM" not in out
    check(out, 2)


# ---- torch


TORCH = """
import json, os, signal, sys
from pathlib import Path
import torch
import farandole.torch as hvd

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(3)
data = torch.randn(50, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data, even=False, seed=1)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0, seen=[])
calls = []
state.register_reset_callbacks([lambda: calls.append(hvd.size())])

@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        for i, index in enumerate(torch.tensor(list(state.sampler)).split(3)):
            died = Path(__file__).with_name(f"died at {state.steps}")
            if [hvd.rank(), state.steps] in DEATHS and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(data[index]).pow(2).mean().backward()
            optimizer.step()
            state.sampler.record_batch(i, len(index))
            state.seen = [*state.seen, *hvd.allgather(index, name="seen").tolist()]
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
bits = [x.hex() for p in model.parameters() for x in p.flatten().tolist()]
same = hvd.allgather_object(bits)
assert all(each == same[0] for each in same), same
if hvd.rank() == 0:
    print("trained " + json.dumps([hvd.size(), calls, state.seen, bits]), flush=True)
"""


def trained(job: SupervisedJob) -> list[object]:
    """Ranks, calls of the reset callback, samples and parameters at the end."""
    (line,) = re.findall(r"^trained (.*)$", job.finish().check().out, re.MULTILINE)
    return json.loads(line)


def test_torch_goes_on_with_the_same_bits(elastic_ranks: Start) -> None:
    """Adam's state and the sampler's place are in the commit: one step is made again."""
    calm = trained(elastic_ranks(TORCH.replace("DEATHS", "[]"), 2))
    found = trained(elastic_ranks(TORCH.replace("DEATHS", "[[1, 5]]"), 2))
    assert found == [2, [2], *calm[2:]]


def test_a_sampler_gives_each_sample_once(elastic_ranks: Start) -> None:
    """4, then 3, then 2 ranks, of which some have one batch more than others."""
    head = f"import os, signal\nif os.environ['FARANDOLE_AGENT'].endswith('+'): {NOBODY}\n"
    source = head + TORCH.replace("DEATHS", "[[0, 3], [2, 7]]")
    ranks, calls, seen, _ = trained(elastic_ranks(source, 4, *ALONE))
    assert (ranks, calls) == (2, [3, 2])
    assert isinstance(seen, list)
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
