# SPDX-License-Identifier: Apache-2.0
"""Elastic training in a program whose ranks do as tests tell. Its global batches are the same for
any number of ranks, and its sums are exact, so that its end has the same bits."""

from __future__ import annotations

import functools
import re

import numpy as np

__all__ = ["WORLDS", "check", "ends", "training", "undisturbed", "worlds"]

# dies(place, state) is called on every rank at these places: before a "step", when a "commit" has
# saved and not yet met the others, in the "reset" of a new world, before its "sync", and at the
# "end" of training; event(state) after each commit. `first(name)` is true once, on whichever rank
# asks first. The variable SIZES has steps at which all wait until there are so many ranks.
WORLDS = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import farandole as fd
import farandole.elastic

FOLDER = Path(__file__).parent
SIZES = json.loads(os.environ.get("SIZES", "{}"))

def first(name):
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def die():
    print(f"rank {fd.rank()} of world {state.world} dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def dies(place, state):
    pass

def event(state):
    pass

def reset():
    print(f"reset on {fd.rank()} of {fd.size()}", flush=True)
    dies("reset", state)

class Doomed(farandole.elastic.ObjectState):
    def save(self):
        super().save()
        dies("commit", self)

    def sync(self):
        dies("sync", self)
        super().sync()

fd.init()
SAMPLES, BATCH, EPOCHS = 48, 12, 3
state = Doomed(epoch=0, counted=0, seen=[], weights=np.ones(5), steps=0, sizes=[])
state.register_reset_callbacks([reset])

@farandole.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        order = np.random.default_rng(state.epoch).permutation(SAMPLES)
        while state.counted < SAMPLES:
            while fd.size() < SIZES.get(str(state.steps), 0):
                state.check_host_updates()
            dies("step", state)
            mine = order[state.counted : state.counted + BATCH][fd.rank() :: fd.size()]
            # Multiples of 2**-30: sums of them are exact, in whatever order.
            parts = [np.round(np.sin(state.weights * (i + 1)) * 2**30) / 2**30 for i in mine]
            total = fd.allreduce(np.sum(parts, axis=0), op=fd.Sum, name="gradient")
            state.seen = [*state.seen, *fd.allgather(mine, name="mine").tolist()]
            state.weights = state.weights * 0.97 + total / BATCH
            state.counted += BATCH
            state.steps += 1
            state.sizes = [*state.sizes, fd.size()]
            state.commit()
            event(state)
        state.epoch, state.counted = state.epoch + 1, 0
    dies("end", state)

def main():
    train(state)
    for epoch in range(EPOCHS):
        assert sorted(state.seen[epoch * SAMPLES :][:SAMPLES]) == list(range(SAMPLES)), state.seen
    assert len(state.seen) == EPOCHS * SAMPLES
    assert fd.allreduce(np.ones(1), op=fd.Sum, name="after")[0] == fd.size()
    bits = " ".join(x.hex() for x in state.weights)
    sizes = ",".join(map(str, state.sizes))
    print(f"rank {fd.rank()} of {fd.size()} in world {state.world}, {sizes}: {bits}", flush=True)
"""


def worlds(when: str = "False", late: str = "", joins: str = "") -> str:
    """WORLDS, where ranks die when `when` is true; `late` is done at the end of the file, and
    `joins` at its beginning, by processes that were started when others trained already."""
    head = "if os.environ['FARANDOLE_AGENT'].endswith('+'):\n    " + (joins or "pass")
    dies = f"def dies(place, state):\n    step, rank = state.steps, fd.rank()\n    if {when}:\n"
    return f"import os, signal\n{head}\n{WORLDS}\n{dies}        die()\n\n{late}\nmain()\n"


def training(does: str = "pass") -> str:
    """WORLDS, where each rank does this after each commit."""
    return f"{WORLDS}\ndef event(state):\n    {does}\n\nmain()\n"


def ends(out: str) -> dict[int, tuple[int, int, list[int], str]]:
    """By rank: ranks, world, the number of ranks at each step, and the weights at the end."""
    found = re.findall(r"rank (\d+) of (\d+) in world (\d+), ([\d,]*): (.*)", out)
    return {
        int(rank): (int(size), int(world), [int(x) for x in sizes.split(",")], bits)
        for rank, size, world, sizes, bits in found
    }


@functools.cache
def undisturbed() -> str:
    """The weights at the end of a run without deaths."""
    weights = np.ones(5)
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(48)
        for batch in order.reshape(-1, 12):
            parts = [np.round(np.sin(weights * (i + 1)) * 2**30) / 2**30 for i in batch]
            weights = weights * 0.97 + np.sum(parts, axis=0) / 12
    return " ".join(x.hex() for x in weights)


def check(out: str, ranks: int | None = None, world: int | None = None) -> None:
    """All `ranks` have ended, in that world, with those bits; None: however many it says."""
    found = ends(out)
    assert found, out
    ranks, world = ranks or found[min(found)][0], world or found[min(found)][1]
    assert sorted(found) == list(range(ranks)), out
    for each in found.values():
        assert each[:2] == (ranks, world), out
        assert each[3] == undisturbed(), out
