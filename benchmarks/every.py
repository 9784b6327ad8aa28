# SPDX-License-Identifier: Apache-2.0
"""Runs all benchmarks of docs/benchmarks.md in order, or those named; `make bench` calls it.

    make bench                                             all, at 2 and at 4 ranks
    make bench ARGS="latency training --ranks 2"           some
    make bench ARGS="--quick"                              all, for a short time, as a test

The output of each part is also written to build/bench/PART-RANKS.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench"
PROGRAMS = "build/release/benchmarks"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `{ranks}` in the command stands for the number of ranks. A short run appends
    `quick`."""

    what: str
    command: str
    quick: str = ""
    under_mpirun: bool = True
    by_ranks: bool = True


PARTS = {
    "c_calls": Benchmark(
        "calls through the C ABI", f"{PROGRAMS}/c_calls {{ranks}}", "2", under_mpirun=False
    ),
    "bench": Benchmark(
        "bandwidth by size, with gloo and MPI",
        "farandole bench -b 1K -f 4 --peers zerocopy,gloo,mpi --json build/bench/bench{ranks}.json",
        "-e 64K -n 5",
    ),
    "collectives": Benchmark(
        "blocking calls, many small ones, ResNet-50", "python benchmarks/collectives.py", "--quick"
    ),
    "latency": Benchmark(
        "one small sum, on idle and busy cores",
        "python benchmarks/latency.py",
        "--calls 60 --turns 2",
    ),
    "small_calls": Benchmark(
        "small calls between computations, with gloo and MPI",
        "python benchmarks/small_calls.py",
        "--turns 5 --sizes 4 64K",
    ),
    "training": Benchmark("steps, with DDP", "python benchmarks/training.py", "--turns 2"),
    "idle": Benchmark("cost of an idle rank", "python benchmarks/idle.py", "--seconds 1"),
    "python_cost": Benchmark(
        "CPU time of a call from Python", "python benchmarks/python_cost.py", "--steps 4"
    ),
    "coordinator": Benchmark(
        "the coordinator with thousands of ranks",
        f"{PROGRAMS}/host_scale",
        "161 8 64",
        under_mpirun=False,
        by_ranks=False,
    ),
}


def command_of(part: Benchmark, ranks: int, quick: bool) -> list[str]:
    launcher = ["mpirun", "-np", str(ranks)] if part.under_mpirun else []
    words = f"{part.command} {part.quick}" if quick else part.command
    return [*launcher, *words.format(ranks=ranks).split()]


def run(command: Sequence[str], output: Path) -> int:
    """Prints a command's output, and also writes it to a file."""
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        output.open("w") as file,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    return process.returncode


def main() -> int:
    """Runs the parts. Returns 1 after all of them if a part has failed."""
    names = ", ".join(PARTS)
    parser = argparse.ArgumentParser(description=f"The benchmarks of docs/benchmarks.md: {names}.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--ranks", default="2,4", metavar="LIST", help="2,4")
    parser.add_argument("--quick", action="store_true", help="short runs, as a test")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose among {names}")
    sizes = [int(text) for text in options.ranks.split(",")]
    chosen = [(name, PARTS[name]) for name in PARTS if name in options.parts or not options.parts]
    runs = [(name, part, size) for size in sizes for name, part in chosen if part.by_ranks]
    runs += [(name, part, 1) for name, part in chosen if not part.by_ranks]

    FOLDER.mkdir(parents=True, exist_ok=True)
    out = Console()
    failed = []
    for number, (name, part, size) in enumerate(runs, start=1):
        label = f"{name}-{size}" if part.by_ranks else name
        ranks = f", {size} ranks" if part.by_ranks else ""
        out.rule(f"{number} of {len(runs)}: {name}{ranks}: {part.what}")
        start = time.monotonic()
        code = run(command_of(part, size, options.quick), FOLDER / f"{label}.txt")
        out.print(f"{label}: {time.monotonic() - start:.0f} s", style="dim", highlight=False)
        failed += [f"{label} (exit code {code})"] if code != 0 else []
    if failed:
        out.print(f"failed: {', '.join(failed)}", style="red", highlight=False)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
