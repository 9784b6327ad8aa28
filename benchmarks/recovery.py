# SPDX-License-Identifier: Apache-2.0
"""How long elastic training stands still when a rank is killed, and whether it then ends as if
nobody had died.

    python benchmarks/recovery.py --kills 200
    python benchmarks/recovery.py --kills 200 --ulfm ../e0af7c9  # in turns with ULFM's way there
    python benchmarks/recovery.py --kills 40 --pairs             # the second during the recovery
    python benchmarks/recovery.py --kills 20 --stop 2            # stopped, with a limit of 2 s

Jobs of 4 ranks lose a random rank, rank 0 included, at a random time, and then another one. Each
step sleeps for 5 ms and commits. Printed: median and p99 of the time from SIGKILL until the last
survivor has made its next step; not with --pairs. With --stop ranks get SIGSTOP, and so hang:
FARANDOLE_STALL_ABORT is so many seconds, which the times contain. The script fails unless every job
ends with the bits of one without deaths, each sample of each epoch counted once, and 0. `--ulfm`
takes a checkout of commit e0af7c9, built and with its .venv: the last one that had ULFM.
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

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
ULFM = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
RANKS, DEATHS = 4, 2
SAMPLES, BATCH, EPOCHS = 480, 12, 5
LONGEST = 120.0  # seconds for a job


def train() -> None:
    """One rank of a job."""
    import numpy as np

    import farandole as fd
    import farandole.elastic

    fd.init()
    state = farandole.elastic.ObjectState(epoch=0, counted=0, seen=[], weights=np.ones(5))
    told = 0  # the last world in which this rank has told of its first step

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


def command_of(ulfm: Path | None) -> list[str]:
    """What starts a job."""
    bin_ = Path(sys.executable).parent if ulfm is None else ulfm.resolve() / ".venv/bin"
    farandole = ("farandole", "run", "--elastic", "--min-np", "1", "-np")
    first, *words = farandole if ulfm is None else ("mpirun", *ULFM, "-np")
    return [str(bin_ / first), *words, str(RANKS), str(bin_ / "python"), __file__, "--rank"]


def job(
    draw: random.Random,
    deaths: int,
    pairs: bool = False,
    ulfm: Path | None = None,
    stop: int = 0,
) -> tuple[list[float], set[str]]:
    """Runs one; returns the seconds that its survivors needed, and the weights at its end."""
    command = command_of(ulfm)
    limit = {"FARANDOLE_STALL_ABORT": str(stop)} if stop else {}
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **limit},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    took: list[float] = []
    ends: set[str] = set()
    steps: dict[int, float] = {}  # by process, in the present world
    waits: set[int] = set()  # survivors that have not told of a step since
    world, killed, left = 0, 0.0, deaths
    signal.alarm(int(LONGEST))  # ends this script, and with it its pipe
    for line in process.stdout:
        lines.append(line)
        if found := re.match(r"step (\d+) (\d+) ([\d.]+)", line):
            if int(found[1]) > world:
                world, steps = int(found[1]), {}
            steps[int(found[2])] = float(found[3])
            if waits - set(steps) or (not killed and len(steps) < RANKS):
                continue
            if waits and not pairs:
                took.append(max(steps[pid] for pid in waits) - killed)
            waits = set()
            for victim in draw.sample(sorted(steps), min(left, 1 + pairs, len(steps) - 1)):
                time.sleep(draw.uniform(0.0, 0.3))
                killed = time.monotonic()
                os.kill(victim, signal.SIGSTOP if stop else signal.SIGKILL)
                left -= 1
                waits = (waits or set(steps)) - {victim}
        elif line.startswith("end "):
            ends.add(line)
    code = process.wait()
    signal.alarm(0)
    if code != 0 or left or len(ends) != 1:
        sys.exit(f"a job of {deaths} deaths ended with {code}:\n" + "".join(lines))
    return took, ends


def main() -> None:
    """Runs the jobs and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--stop", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--ulfm", type=Path, metavar="FOLDER")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train()
        return
    draw = random.Random(options.seed)
    _, undisturbed = job(draw, 0)
    ways: dict[str, Path | None] = {"by agents": None}
    if options.ulfm:
        ways["by ULFM"] = options.ulfm
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(0, options.kills, DEATHS):
        for way, ulfm in ways.items():  # in turns
            took, ends = job(draw, DEATHS, options.pairs, ulfm, options.stop)
            times[way] += took
            if ends != undisturbed:
                sys.exit(f"a disturbed job ended with {ends}, and not with {undisturbed}")
    for way, found in times.items():
        if options.pairs:
            print(f"{way}: {options.kills} kills in pairs: all jobs have ended as one without")
            continue
        cut = quantiles(found, n=100, method="inclusive")
        what = "stops" if options.stop else "kills"
        print(
            f"{way}: {len(found)} {what}, until the next step: median {median(found):.3f} s, "
            f"p99 {cut[98]:.3f} s, longest {max(found):.3f} s"
        )


if __name__ == "__main__":
    main()
