#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of c10d's collectives and of DDP, over the backend `farandole`.

    make test-c10d ARGS="[--backend gloo] [--ranks 4] [-k PATTERN] [--json FILE]"

The installed torch brings them (torch.testing._internal.distributed.distributed_test). They are
copied to build/c10d with gloo's name replaced by the backend's, and run in forked ranks that meet
by a file. torch skips what needs a GPU, torchvision or another backend. `--backend gloo` runs the
same unchanged.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing
from torch.testing._internal import common_distributed

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = "torch.testing._internal.distributed.distributed_test"
SECONDS = 60  # for a test, but for those that torch gives a time of their own
# What fails over farandole, and why.
_GLOO_ONLY = "dist.monitored_barrier() takes groups of gloo only; a group's method is ours"
KNOWN = {
    "test_ddp_logging_data_cpu": "it asks DDP for settings of gloo",
    "test_monitored_barrier_gloo": _GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": "it wants gloo's text; ours names who is missing",
    "test_monitored_barrier_gloo_subgroup": _GLOO_ONLY,
}


def load(backend: str) -> Any:
    """torch's tests as a module, for that backend."""
    spec = importlib.util.find_spec(ORIGIN)
    assert spec is not None
    assert spec.origin is not None
    copy = ROOT / "build" / "c10d" / "distributed_test.py"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(Path(spec.origin).read_text().replace('"gloo"', f'"{backend}"'))
    cases = common_distributed.DistTestCases
    for feature in cases.backend_feature.values():
        feature.add(backend)
    sys.path.insert(0, str(copy.parent))
    import distributed_test  # type: ignore[import-not-found]

    return distributed_test


def forked(tests: Any) -> type[unittest.TestCase]:
    """The tests, each in ranks that are forked from this process."""

    class Forked(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *arguments: Any, **options: Any) -> None:
            import farandole.torch  # noqa: F401 (registers the backend; a rank is no fork of a user)

            super()._run(*arguments, **options)

    return Forked


def run(case: unittest.TestCase) -> tuple[str, str]:
    """Its outcome, and what is known of it."""
    result = unittest.TestResult()
    case.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    failed = result.errors + result.failures
    return ("failed", failed[0][1]) if failed else ("passed", "")


def main() -> int:
    """1 where something has failed that is not KNOWN."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--backend", default="farandole")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("-k", default="", metavar="PATTERN", help="tests whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ.update(BACKEND=options.backend, WORLD_SIZE=str(options.ranks))
    common_distributed.TIMEOUT_DEFAULT = SECONDS
    torch.set_num_threads(1)
    suite = forked(load(options.backend))
    names = [name for name in dir(suite) if re.search(f"^test_.*{options.k}", name)]
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        start = time.monotonic()
        found[name] = run(suite(name))
        took = time.monotonic() - start
        print(f"{found[name][0]:8} {took:6.1f} s  {name}", file=sys.__stdout__, flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    failed = [name for name, (outcome, _) in found.items() if outcome == "failed"]
    for name in failed:
        known = KNOWN.get(name) if options.backend == "farandole" else None
        print(f"{name}: {known or found[name][1]}")
    counts = Counter(outcome for outcome, _ in found.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return int(not KNOWN.keys() >= set(failed))


if __name__ == "__main__":
    sys.exit(main())
