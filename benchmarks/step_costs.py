# SPDX-License-Identifier: Apache-2.0
"""Measures the time that a timeline, or comparing the ranks' models, adds to a step.

    mpirun -np 2 --bind-to none python benchmarks/step_costs.py timeline|verify [--turns 60]

Alternates between steps (forward, backward, optimizer) with and without it. Each step of `verify`
compares all parameters; training does so only every FARANDOLE_VERIFY_EVERY steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from small_nets import wide
from training import OURS, Trainer
from turns import Contestant, finish, head, show, take_turns

import farandole.torch as hvd

WHATS = {"timeline": wide(256, 40, 128), "verify": wide(1024, 8, 32)}


class Verified(Trainer):
    """Compares models in every step if it is `verify`, else never."""

    def optimizer_of(self, who: str) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.01)
        every = int(who == "verify")
        return hvd.DistributedOptimizer(sgd, verify_every=every, verify="raise")


def contestants(what: str, folder: str) -> dict[str, Contestant]:
    if what == "verify":
        return {who: Verified(WHATS[what], who).contestant() for who in ("without", what)}
    plain = Trainer(WHATS[what], OURS).contestant()

    def begin() -> None:
        plain.prepare()
        hvd.start_timeline(Path(folder) / f"{hvd.rank()}.json")

    def end() -> int:
        hvd.stop_timeline()
        return 0

    return {"without": plain, what: Contestant(begin, plain.run, end)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=WHATS)
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    head()
    with tempfile.TemporaryDirectory() as folder:
        rows = take_turns(options.what, contestants(options.what, folder), options.turns, np.max)
    show(rows)
    if hvd.rank() == 0:
        more = 1e3 * float(np.median(rows[1].seconds - rows[0].seconds))
        print(f"# {more:.2f} ms more, {rows[1].ratio(rows[0]):.3f} x")
    code = finish(rows, None)
    hvd.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
