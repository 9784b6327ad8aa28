# SPDX-License-Identifier: Apache-2.0
"""Times init() of two checkouts alternately, to see what a change adds to the start of a job. Each
tree must be built, with its .venv.

    python benchmarks/init.py /path/to/before . --ranks 2 4 --turns 7

MPI takes a second to start, so it starts before the first init(). Each time is that of the slowest
rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

_AGAIN = 10  # number of restarts in a job

_PROGRAM = f"""
import json, time
import numpy as np
import farandole as fd
from mpi4py import MPI

def timed():
    began = time.monotonic()
    fd.init()
    own = time.monotonic() - began
    return float(fd.allreduce(np.array([own]), op=fd.Max)[0])

times = [timed()]
for _ in range({_AGAIN}):
    fd.shutdown()
    times.append(timed())
if fd.rank() == 0:
    print(json.dumps(times))
fd.shutdown()
"""


def times_of(tree: Path, ranks: int) -> tuple[float, list[float]]:
    """Seconds of the first init() of a job, and of each later one."""
    launcher = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    command = [*launcher, str(tree / ".venv/bin/python"), "-c", _PROGRAM]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"{tree}: {done.stdout}{done.stderr}")
    first, *later = json.loads(done.stdout.splitlines()[-1])
    return first, later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    trees = [options.before.resolve(), options.after.resolve()]
    for ranks in options.ranks:
        firsts: list[list[float]] = [[], []]
        laters: list[list[float]] = [[], []]
        for _ in range(options.turns):
            for place, tree in enumerate(trees):
                first, later = times_of(tree, ranks)
                firsts[place].append(first)
                laters[place] += later
        for what, found in (("first init()", firsts), ("later init()", laters)):
            before, after = (1000 * statistics.median(seconds) for seconds in found)
            print(
                f"{ranks} ranks, {what}: {before:.1f} ms before, {after:.1f} ms after, "
                f"{after - before:+.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
