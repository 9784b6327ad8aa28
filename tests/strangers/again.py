# SPDX-License-Identifier: Apache-2.0
"""Runs one program by hand: `python -m strangers.again RANKS FILE [TIMES]`, with tests/ on
PYTHONPATH. FILE holds what a failed test has printed; each run has new ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from strangers.loops import Loop
from strangers.plan import plan
from strangers.program import Program
from strangers.verdict import Failure
from strangers.world import World

__all__ = ["read"]


def read(text: str) -> Program | Loop:
    """What Program.text() or Loop.text() has written."""
    found = json.loads(text)
    return Loop.read(found["loop"]) if "loop" in found else Program.read(found["calls"])


def main(ranks: int, path: str, times: int) -> int:
    """Says what each run found; 1 where one failed."""
    program = read(Path(path).read_text())
    if isinstance(program, Program):
        for rank, script in enumerate(plan(program, ranks).scripts):
            print(f"rank {rank}:", *(f"\n  {place} {line}" for place, line in enumerate(script)))
    failures = 0
    with World(ranks) as world:
        for run in range(times):
            try:
                world.run(program)
                print(f"run {run}: as it must be")
            except Failure as failure:
                failures += 1
                print(f"run {run}: {type(failure).__name__}: {failure}")
            world.end()
    print(f"{failures} of {times} runs failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1))
