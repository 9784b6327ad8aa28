# SPDX-License-Identifier: Apache-2.0
"""Jobs under `farandole run --elastic`, and a program for them whose ranks do as tests tell.
harness/worlds.py has one that ends with the same bits whatever the number of ranks."""

from __future__ import annotations

import functools
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.process import Job

__all__ = [
    "TRAINING",
    "SupervisedJob",
    "check",
    "farandole_run",
    "results",
    "story",
    "training",
    "undisturbed",
]

# Three epochs of 24 samples, one a rank and step, and a commit after each step. `event(step)` is
# called on every rank after each commit; `first(name)` is true once, on whichever rank asks first.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import farandole as fd
import farandole.elastic

FOLDER = Path(__file__).parent

def first(name):
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

fd.init()
SAMPLES, EPOCHS = 24, 3
state = farandole.elastic.ObjectState(epoch=0, counted=0, seen=[], weights=np.ones(5), steps=0)
state.register_reset_callbacks([lambda: print(f"reset on {fd.rank()} of {fd.size()}", flush=True)])

@farandole.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        order = np.random.default_rng(state.epoch).permutation(SAMPLES)
        while state.counted < SAMPLES:
            mine = order[state.counted + fd.rank()]
            gradient = np.sin(state.weights * (mine + 1)) / (3 + fd.rank())
            total = fd.allreduce(gradient, op=fd.Sum, name="gradient")
            state.weights = state.weights * 0.97 + total
            state.seen = [*state.seen, *order[state.counted : state.counted + fd.size()]]
            state.counted += fd.size()
            state.steps += 1
            state.commit()
            event(state)
        state.epoch, state.counted = state.epoch + 1, 0

def main():
    train(state)
    for epoch in range(EPOCHS):
        assert sorted(state.seen[epoch * SAMPLES :][:SAMPLES]) == list(range(SAMPLES)), state.seen
    assert len(state.seen) == EPOCHS * SAMPLES
    bits = " ".join(x.hex() for x in state.weights)
    print(f"rank {fd.rank()} of {fd.size()} after {state.steps} steps: {bits}", flush=True)
"""


def farandole_run(options: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` under a supervisor."""
    command = [sys.executable, "-m", "farandole", "run", "--elastic"]
    return [*command, *options, "--", *argv]


class SupervisedJob(Job):
    """A running `farandole run --elastic`."""

    def __init__(
        self, options: Sequence[str], argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(farandole_run(options, argv), env or {})


def results(out: str) -> dict[int, str]:
    """By rank, the weights that TRAINING printed at its end."""
    found = re.findall(r"rank (\d+) of \d+ after \d+ steps: (.*)", out)
    return {int(rank): bits for rank, bits in found}


def training(event: str = "pass") -> str:
    """TRAINING with this event, and run."""
    return f"{TRAINING}\ndef event(state):\n    {event}\n\nmain()\n"


@functools.cache
def undisturbed(ranks: int) -> str:
    """The weights of a run without any event, in which no rank knows more than another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(training())
        options = ("-np", str(ranks), "--checkpoint-dir", folder)
        with SupervisedJob(options, [sys.executable, str(path)]) as job:
            found = results(job.finish().check().out)
    assert len(found) == ranks
    assert len(set(found.values())) == 1
    return found[0]


def check(out: str, ranks: int) -> None:
    """Raises AssertionError unless all ranks ended with the weights of an undisturbed run."""
    assert results(out) == dict.fromkeys(range(ranks), undisturbed(ranks)), out


def story(out: str) -> list[str]:
    """The lines of the supervisor, its agents and its ranks, without the host's name."""
    found = re.findall(r"^farandole: (.*)$", out, re.MULTILINE)
    return [line.replace(f" on {socket.gethostname()}", "") for line in found]
