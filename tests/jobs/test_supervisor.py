# SPDX-License-Identifier: Apache-2.0
"""`farandole run --elastic` on one machine: what it starts anew and what not, and what becomes of
the training. tests/hosts/test_supervised_hosts.py loses hosts."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.supervised import (
    TRAINING,
    SupervisedJob,
    check,
    results,
    story,
    supervised_job,
    training,
    undisturbed,
)

Start = Callable[..., SupervisedJob]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(source, ranks, *options, env=None): that program under the supervisor."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def start_(
            source: str, ranks: int, *options: str, env: dict[str, str] | None = None
        ) -> SupervisedJob:
            path = tmp_path / "program.py"
            path.write_text(source)
            argv = [sys.executable, str(path)]
            words = ("-np", str(ranks), *options) if ranks else options
            return stack.enter_context(supervised_job(words, argv, env))

        yield start_


DIES = "if fd.rank() == {victim} and state.steps == {step} and first('died'): {end}"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(("ranks", "victim", "step"), [(1, 0, 5), (2, 1, 13), (4, 0, 7), (4, 3, 1)])
def test_a_killed_rank(start: Start, tmp_path: Path, ranks: int, victim: int, step: int) -> None:
    """Training goes on from the last commit, and ends with the same bits."""
    result = start(training(DIES.format(victim=victim, step=step, end=KILLED)), ranks).finish()
    result.check()
    check(result.out, ranks)
    told = story(result.out)
    assert told[0] == f"start 1: {ranks} rank{'s' * (ranks > 1)}"
    assert re.match(rf"rank {victim} on \S+ ended without a word after {step} commit", told[1])
    assert told[2].startswith("start 2:")
    assert told[-1] == "the job has finished after 1 restart"
    assert result.out.count("reset on") == ranks, "callbacks run once on each new rank"
    assert not list(tmp_path.glob("elastic-*")), "its own folder goes when all is well"


def test_ranks_that_end_with_0_in_the_middle(start: Start) -> None:
    """Nobody has said that it is done, whatever mpirun returns."""
    result = start(training("if state.steps == 4 and (first(str(fd.rank()))): os._exit(0)"), 2)
    out = result.finish().check().out
    assert "ended without a word after 4 commits" in out
    check(out, 2)


def test_a_library_error_is_tried_again(start: Start) -> None:
    event = "if state.steps == 4 and first(str(fd.rank())): raise fd.LibraryError('a broken cable')"
    # Outside of train(), which would try it again by itself.
    source = training().replace("    train(state)\n", f"    train(state)\n    {event}\n")
    source = source.replace("state.steps == 4", "state.steps == 36")
    out = start(source, 2).finish().check().out
    assert "a broken cable" in out
    assert "start 2:" in out
    check(out, 2)


PROGRAMS_OWN = {
    "ValueError": ("raise ValueError('bad data')", "ValueError: bad data", 1),
    "MismatchError": ("fd.allreduce(np.ones(2 + fd.rank()), name='m')", "MismatchError", 1),
    "exit code": ("sys.exit(7)", r"sys\.exit\(7\)", 7),
}


@pytest.mark.parametrize("how", PROGRAMS_OWN)
def test_the_programs_own_errors_are_not_tried_again(start: Start, how: str) -> None:
    action, text, code = PROGRAMS_OWN[how]
    result = start(training(f"if state.steps == 3: {action}"), 2).finish()
    assert result.returncode == code, result.out
    told = story(result.out)
    assert any(re.search(text, line) for line in told), result.out
    assert any("not tried again" in line for line in told)
    assert "start 2" not in result.out


@pytest.mark.parametrize(
    ("source", "code"), [("import no_such_module\n", 1), ("def f(:\n", 1), ("'nothing to do'", 0)]
)
def test_an_end_before_init_is_not_tried_again(start: Start, source: str, code: int) -> None:
    result = start(source, 2).finish()
    assert result.returncode == code, result.out
    assert f"the launcher ended with {code} before any rank had called init()" in result.out
    assert "start 2" not in result.out


def test_two_programs_side_by_side(start: Start) -> None:
    """`a.py : -np 1 b.py` of MPI's launchers: a rank more than the option says."""
    argv = [sys.executable, "-c", "import farandole; farandole.init()"]
    with supervised_job(("-np", "1"), [*argv, ":", "-np", "1", *argv]) as job:
        assert "finished after 0 restarts" in job.finish().check().out


def test_a_program_that_always_dies(start: Start) -> None:
    source = training().replace("fd.init()\n", f"fd.init()\n{KILLED}\n")
    result = start(source, 2, "--restarts", "2").finish()
    assert result.returncode == 1
    assert "start 3:" in result.out
    assert "start 4:" not in result.out
    assert "3 starts without a commit" in result.out


def test_each_commit_gives_new_restarts(start: Start) -> None:
    end = f"if state.steps % 4 == 0 and fd.rank() == 1 and first(f'at {{state.steps}}'): {KILLED}"
    out = start(training(end), 2, "--restarts", "0").finish().check().out
    assert "start 10:" in out
    check(out, 2)


def test_two_trainings_in_one_program(start: Start) -> None:
    """Each goes on from its own commits, though their states have the same names."""
    source = TRAINING.replace("def main():\n", "def train_once():\n")
    source += """
def event(state):
    if state.epoch == 1 and state.steps == 19 and len(ended) == fd.rank() == 1 and first("died"):
        os.kill(os.getpid(), signal.SIGKILL)

ended = []
train_once()
ended.append(1)
state = farandole.elastic.ObjectState(epoch=0, counted=0, seen=[], weights=np.ones(5), steps=0)
train_once()
"""
    out = start(source, 2).finish().check().out
    assert "start 2" in out
    found = re.findall(r"rank 0 of 2 after (\d+) steps: (.*)", out)
    assert [steps for steps, _ in found] == ["36"] * 3, "the first one twice, then the second"
    assert {bits for _, bits in found} == {undisturbed(2)}


def test_programs_in_turn(start: Start, tmp_path: Path) -> None:
    """`bash -c 'python a.py; python b.py'`: each is a rank in its turn."""
    (tmp_path / "a.py").write_text("import farandole as fd\nfd.init()\nprint('a', fd.rank())\n")
    (tmp_path / "b.py").write_text(training(DIES.format(victim=1, step=9, end=KILLED)))
    line = f"{sys.executable} {tmp_path}/a.py && {sys.executable} {tmp_path}/b.py"
    with supervised_job(("-np", "2"), ["bash", "-c", line]) as job:
        out = job.finish().check().out
    assert out.count("a 1") == 2, "what the first has said is not the second's last word"
    check(out, 2)


# ---- signals

HOLDS = """
    if state.steps == 9:
        if fd.rank() == 0:  # whose commit is on the disk
            print("holds", flush=True)
        while True:
            state.check_host_updates()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1), (4, 2)])
def test_a_rank_that_is_preempted_takes_the_others_along(
    start: Start, number: int, ranks: int, victim: int
) -> None:
    """All leave at the next commit, with it on the disk, and go on from there."""
    end = f"os.kill(os.getpid(), {int(number)})"
    out = start(training(DIES.format(victim=victim, step=6, end=end)), ranks).finish().check().out
    assert f"rank {victim} got {signal.Signals(number).name}" in out
    assert "all ranks left after 7 commits, and their state is on the disk" in out
    check(out, ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_supervisor_that_is_preempted(start: Start, tmp_path: Path, number: int) -> None:
    """It ends with a code of its own, and the same command goes on."""
    options = ("--checkpoint-dir", str(tmp_path / "kept"))
    job = start(training(HOLDS), 2, *options)
    job.process.wait_for_output("holds")
    job.process.signal(number)
    result = job.finish()
    assert result.returncode == 75, result.out
    assert "all ranks left" in result.out
    assert f"--checkpoint-dir {tmp_path / 'kept'} goes on from there" in result.out
    out = start(training(HOLDS), 2, *options).finish().check().out
    assert out.count("reset on") == 2
    check(out, 2)


def test_a_supervisor_that_is_interrupted(start: Start) -> None:
    job = start(training(HOLDS), 2)
    job.process.wait_for_output("holds")
    job.process.signal(signal.SIGINT)
    result = job.finish()
    assert result.returncode == 130, result.out


def test_an_impatient_user(start: Start) -> None:
    """Ctrl-C twice, which a terminal sends to all of the group: no rank lives on."""
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('waits')\n"
    job = start(stubborn + "while True: signal.pause()\n", 1)
    for text in ("waits", "SIGINT: the job is ended"):
        job.process.wait_for_output(text)
        os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish().returncode == 130


def test_a_supervisor_that_is_killed(start: Start) -> None:
    """Its ranks leave at their next commit: whoever starts the job again must find it free."""
    job = start(training(HOLDS), 2)
    job.process.wait_for_output("holds")
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()


def test_grace_that_is_over(start: Start) -> None:
    """A rank that does not come to a commit is ended by the kernel, a job by its supervisor."""
    hangs = DIES.format(
        victim=1, step=6, end="os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)"
    )
    out = start(training(hangs), 2, env={"FARANDOLE_GRACE": "1"}).finish().check().out
    assert "within 1 s" in out
    assert "rank 1 on" in out
    check(out, 2)


def test_grace_that_is_over_for_all(start: Start) -> None:
    event = "if state.steps == 6: print('sleeps', flush=True); time.sleep(1000)"
    job = start(training(event), 2, env={"FARANDOLE_GRACE": "1"})
    job.process.wait_for_output("sleeps")
    job.process.signal(signal.SIGTERM)
    result = job.finish()
    assert result.returncode == 75, result.out
    assert "the launcher has not ended by itself" in result.out


def test_a_childs_signal_is_its_own(start: Start) -> None:
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
    out = start(training(event), 2).finish().check().out
    assert "got SIGTERM" not in out
    check(out, 2)


# ---- hosts that come and go: the slots of this one


GROWS = """
def event(state):
    wanted = {(2, 2): "localhost:4", (4, 5): "localhost:2"}.get((fd.size(), state.steps))
    if wanted:  # in the middle of an epoch
        if fd.rank() == 0:
            (FOLDER / "new").write_text(wanted)
            os.replace(FOLDER / "new", FOLDER / "hosts")
        while True:
            state.check_host_updates()

main()
"""


def test_hosts_that_come_and_go(start: Start, tmp_path: Path) -> None:
    """Two ranks, then four, then two: each sample is counted once an epoch."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    script = f"cat {tmp_path}/hosts"
    options = ("--host-discovery-script", script, "--min-np", "2")
    out = start(TRAINING + GROWS, 0, *options).finish().check().out
    starts = re.findall(r"start \d: (\d) ranks: \d on localhost", out)
    assert starts == ["2", "4", "2"], out
    assert out.count("the hosts change: all ranks leave at their next commit") == 2
    assert results(out).keys() == {0, 1}


def test_a_script_that_fails_for_a_time(start: Start, tmp_path: Path) -> None:
    """What it said last holds; nothing is started before it has said anything."""
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho 'no such cluster' >&2\nexit 3\n")
    script.chmod(0o755)
    event = (
        "if state.steps == 5 and fd.rank() == 0: (FOLDER / 'nonsense').touch()\n    "
        "while state.steps == 5 and not (FOLDER / 'asked').exists(): time.sleep(0.01)"
    )
    job = start(training(event), 2, "--host-discovery-script", str(script))
    job.process.wait_for_output("ended with 3: no such cluster; the hosts stay as they were: none")
    new = tmp_path / "new"
    new.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n[ ! -e nonsense ] && echo localhost:2 && exit\n"
        "echo '<html>502 Bad Gateway</html>'; touch asked\n"
    )
    new.chmod(0o755)
    new.replace(script)
    result = job.finish().check()
    assert "'<html>502 Bad Gateway</html>' is no host" in result.out
    assert "start 2" not in result.out
    check(result.out, 2)


def test_hosts_that_never_come(start: Start) -> None:
    options = ("--host-discovery-script", "true", "--elastic-timeout", "0.5")
    result = start(training(), 2, *options).finish()
    assert result.returncode == 1
    assert "without hosts for 2 ranks (--min-np); known: none" in result.out
    assert "start 1" not in result.out


# ---- torch


TORCH = """
import os, signal, sys
from pathlib import Path
import torch
import farandole.torch as hvd

FOLDER = Path(__file__).parent
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3)
data = torch.randn(96, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data, seed=1)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0)
calls = []
state.register_reset_callbacks([lambda: calls.append(hvd.size())])

@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        for i, index in enumerate(torch.tensor(list(state.sampler)).split(4)):
            optimizer.zero_grad()
            model(data[index]).pow(2).mean().backward()
            optimizer.step()
            state.sampler.record_batch(i, len(index))
            state.steps += 1
            if state.steps % 3 == 0:
                state.commit()
            if state.steps == 8 and hvd.rank() == hvd.size() - 1 and DIES:
                try:
                    (FOLDER / "died").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()

train(state)
if hvd.rank() == 0:
    bits = " ".join(x.hex() for p in model.parameters() for x in p.flatten().tolist())
    print(f"trained {state.steps} steps, reset {calls}: {bits}", flush=True)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_goes_on_with_the_same_bits(start: Start, tmp_path: Path, ranks: int) -> None:
    """Adam's state and the sampler's place are in the commit: steps 7 and 8 are made again."""
    calm = start(TORCH.replace("DIES", "False"), ranks).finish().check().out
    out = start(TORCH.replace("DIES", "True"), ranks).finish().check().out
    assert "start 2" in out
    found = [re.search(r"trained (\d+) steps, reset (.*): (.*)", text) for text in (calm, out)]
    assert all(found), out
    steps, resets, bits = zip(*(match.groups() for match in found if match), strict=True)
    assert steps == (str(2 * 96 // 4 // ranks),) * 2
    assert resets == ("[]", f"[{ranks}]")
    assert bits[0] == bits[1]
