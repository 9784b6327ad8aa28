# SPDX-License-Identifier: Apache-2.0
"""Measures how long elastic training stops when a rank is killed, and checks that the result is the
same as without deaths.

    python benchmarks/recovery.py --kills 200
    python benchmarks/recovery.py --kills 20 --stop 2    # stopped, with a limit of 2 s

Jobs of 4 ranks lose a random rank, rank 0 included, at a random time, and then another one. Each
step sleeps for 5 ms and commits. Prints median and p99 of the time from SIGKILL until the last
survivor has made its next step. With --stop, SIGSTOP makes ranks hang instead. The option's value
becomes FARANDOLE_STALL_ABORT, and the times include it. Fails unless every job exits with 0, counts
each sample once in each epoch, and ends with exactly the weights of a job without deaths.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

RANKS, DEATHS = 4, 2
SAMPLES, BATCH, EPOCHS = 480, 12, 5
LONGEST = 120.0  # seconds for a job


def train() -> None:
    import numpy as np

    import farandole as fd
    import farandole.elastic

    fd.init()
    state = farandole.elastic.ObjectState(epoch=0, counted=0, seen=[], weights=np.ones(5))
    told = 0  # the last world in which this rank has printed a step

    @farandole.elastic.run
    def loop(state: farandole.elastic.ObjectState) -> None:
        nonlocal told
        while state.epoch < EPOCHS:
            order = np.random.default_rng(state.epoch).permutation(SAMPLES)
            while state.counted < SAMPLES:
                mine = order[state.counted : state.counted + BATCH][fd.rank() :: fd.size()]
                # Multiples of 2**-30: sums of them are exact, in whatever order.
                parts = [np.round(np.sin(state.weights * (i + 1)) * 2**30) / 2**30 for i in mine]
                time.sleep(0.005)
                total = fd.allreduce(np.sum(parts, axis=0), op=fd.Sum, name="gradient")
                state.seen = [*state.seen, *fd.allgather(mine, name="mine").tolist()]
                state.weights = state.weights * 0.97 + total / BATCH
                state.counted += BATCH
                state.commit()
                if told != state.world:
                    told = state.world
                    print(f"step {told} {os.getpid()} {time.monotonic()}", flush=True)
            state.epoch, state.counted = state.epoch + 1, 0

    loop(state)
    for epoch in range(EPOCHS):
        assert sorted(state.seen[epoch * SAMPLES :][:SAMPLES]) == list(range(SAMPLES))
    assert len(state.seen) == EPOCHS * SAMPLES
    print("end " + " ".join(x.hex() for x in state.weights), flush=True)


def job(draw: random.Random, deaths: int, stop: int = 0) -> tuple[list[float], set[str]]:
    """Runs a job. Returns the seconds that survivors needed after each death, and final weights."""
    bin_ = Path(sys.executable).parent
    command = [str(bin_ / "farandole"), "run", "--elastic", "--min-np", "1", "-np", str(RANKS)]
    command += [sys.executable, __file__, "--rank"]
    limit = {"FARANDOLE_STALL_ABORT": str(stop)} if stop else {}
    process = subprocess.Popen(
        command,
        env={**os.environ, **limit},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    took: list[float] = []
    ends: set[str] = set()
    steps: dict[int, float] = {}  # by process, in the present world
    waits: set[int] = set()  # survivors that have not printed a step since the death
    world, killed, left = 0, 0.0, deaths
    signal.alarm(int(LONGEST))  # ends this script, which closes the job's output
    for line in process.stdout:
        lines.append(line)
        if found := re.match(r"step (\d+) (\d+) ([\d.]+)", line):
            if int(found[1]) > world:
                world, steps = int(found[1]), {}
            steps[int(found[2])] = float(found[3])
            if waits - set(steps) or (not killed and len(steps) < RANKS):
                continue
            if waits:
                took.append(max(steps[pid] for pid in waits) - killed)
            waits = set()
            if left:
                victim = draw.choice(sorted(steps))
                time.sleep(draw.uniform(0.0, 0.3))
                killed = time.monotonic()
                os.kill(victim, signal.SIGSTOP if stop else signal.SIGKILL)
                left -= 1
                waits = set(steps) - {victim}
        elif line.startswith("end "):
            ends.add(line)
    code = process.wait()
    signal.alarm(0)
    if code != 0 or left or len(ends) != 1:
        sys.exit(f"a job of {deaths} deaths ended with {code}:\n" + "".join(lines))
    return took, ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train()
        return
    draw = random.Random(options.seed)
    _, undisturbed = job(draw, 0)
    times: list[float] = []
    for _ in range(0, options.kills, DEATHS):
        took, ends = job(draw, DEATHS, options.stop)
        times += took
        if ends != undisturbed:
            sys.exit(f"a disturbed job ended with {ends}, not with {undisturbed}")
    cut = quantiles(times, n=100, method="inclusive")
    print(
        f"{len(times)} {'stops' if options.stop else 'kills'}, until the next step: median "
        f"{median(times):.3f} s, p99 {cut[98]:.3f} s, longest {max(times):.3f} s"
    )


if __name__ == "__main__":
    main()
