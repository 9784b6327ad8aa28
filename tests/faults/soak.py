# SPDX-License-Identifier: Apache-2.0
"""`make soak`: kills a random rank at a random moment, many times, and writes docs/soak.md.

With fewer seeds than the page's it only looks.

Ranks are processes of the C++ test program (no MPI). Every survivor must get a PeerError that names
the dead rank within 2 s, later calls must fail alike, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import sys
from pathlib import Path

from harness.process import Process, check_no_residue
from harness.seed import SEED

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "tests" / "runtime_test"
TEST = "a_killed_rank_fails_all_others_soon"
SIZES = (2, 4)
PAGE_SEEDS = 200


def kill_many(ranks: int, seeds: int) -> float:
    """Seconds that `seeds` jobs took; raises AssertionError with the output if one failed."""
    command = [str(PROGRAM), TEST, "--seeds", str(seeds), "--ranks", str(ranks)]
    command += ["--first", str(SEED)]
    with Process(command, {}) as process:
        result = process.end(10.0 * seeds).check()
        check_no_residue({process.pid})
    passed = re.search(rf"^ok   {TEST} ([\d.]+) s", result.out, re.MULTILINE)
    assert passed, result.out
    return float(passed[1])


def main() -> int:
    """Runs all sizes and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=PAGE_SEEDS)
    seeds = parser.parse_args().seeds
    rows = [f"| {ranks} | {seeds} | {seeds} | {kill_many(ranks, seeds):.1f} s |" for ranks in SIZES]
    machine = f"Linux {platform.release().split('-')[0]}, {platform.machine()}"
    text = f"""# Soak: random deaths

The last result of `make soak` ({datetime.date.today()}, {machine}).
In each job one rank, chosen by the seed, is killed (SIGKILL) up to 6 ms into its work. Passed means
that every survivor got a `PeerError` naming the dead rank within 2 s, that later calls failed
alike, that every process ended, and that no process or file of the job was left.

| ranks | jobs | passed | all together |
|---|---|---|---|
"""
    if seeds >= PAGE_SEEDS:
        (ROOT / "docs" / "soak.md").write_text(text + "\n".join(rows) + "\n")
    print("\n".join(rows), f"SEED={SEED}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
