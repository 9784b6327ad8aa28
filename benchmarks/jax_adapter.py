# SPDX-License-Identifier: Apache-2.0
"""Compares allreduce within jit with mpi4jax; their turns alternate.

    make build/jax/.stamp && build/jax/bin/python -m pip install mpi4jax --no-build-isolation
    PATH=$PWD/.venv/bin:$PATH mpirun -np 2 --bind-to none build/jax/bin/python \
      benchmarks/jax_adapter.py [--turns 40] [--only 64] [--json F]

Cases: 4 B, 1 MB, 64 MB, and the 161 gradients of ResNet-50 as one pytree (mpi4jax: one call each,
in one program). Without mpi4jax, mpi4py's Allreduce in an ordered io_callback replaces it, and the
table says so. A call is timed from its dispatch until its result is ready.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from resnet50 import Shape, shapes
from turns import Contestant, Row, finish, head, show, take_turns

import farandole.jax as hvd

CASES: dict[str, list[Shape]] = {
    "4 B": [(1,)], "1 MB": [(1 << 18,)], "64 MB": [(1 << 24,)], "ResNet-50": shapes(),
}  # fmt: skip
CALLS = {"4 B": 50, "1 MB": 10, "64 MB": 1, "ResNet-50": 1}  # in a turn, one after the other


def other() -> tuple[str, Callable[[Any], Any]]:
    """The other library's name, and its sum of one array."""
    try:
        import mpi4jax
        from mpi4py import MPI
    except ImportError:
        from jax.experimental import io_callback
        from mpi4py import MPI

        def reduce(x: Any) -> Any:
            mine = np.asarray(x)
            result = np.empty_like(mine)
            MPI.COMM_WORLD.Allreduce(mine, result)
            return result

        return "mpi4py in io_callback", lambda x: io_callback(reduce, x, x, ordered=True)
    return "mpi4jax", lambda x: mpi4jax.allreduce(x, op=MPI.SUM)


class Sums:
    """A compiled sum of a list of arrays, called several times a turn."""

    def __init__(self, program: Callable[[Any], Any], xs: Sequence[jax.Array], calls: int) -> None:
        self._program, self._xs, self._calls = jax.jit(program), xs, calls
        self._results: Sequence[jax.Array] = ()

    def run(self) -> float:
        start = time.perf_counter()
        for _ in range(self._calls):
            self._results = jax.block_until_ready(self._program(self._xs))
        return (time.perf_counter() - start) / self._calls

    def wrong(self) -> int:
        total = hvd.size() * (hvd.size() + 1) / 2
        return sum(bool((np.asarray(x) != total).any()) for x in self._results)

    def contestant(self) -> Contestant:
        return Contestant(lambda: None, self.run, self.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--only", default="", help="cases with this prefix")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    hvd.init()
    name, reduce = other()
    head()
    rows: list[Row] = []
    for case, sizes in CASES.items():
        if not case.startswith(arguments.only):
            continue
        xs = [jnp.full(shape, hvd.rank() + 1, "float32") for shape in sizes]
        ours = Sums(lambda tree: hvd.allreduce(tree, op=hvd.Sum, name="sum"), xs, CALLS[case])
        theirs = Sums(lambda tree: [reduce(x) for x in tree], xs, CALLS[case])
        found = take_turns(
            case,
            {"farandole": ours.contestant(), name: theirs.contestant()},
            arguments.turns,
            np.max,
        )
        show(found, against=("mpi",))
        rows += found
    return finish(rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
