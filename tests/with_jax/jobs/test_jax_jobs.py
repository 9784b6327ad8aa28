# SPDX-License-Identifier: Apache-2.0
"""Jobs with collectives within jit: of one thread for XLA; with ranks that die, or end at once."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from harness.mpirun import MpiJob

pytest.importorskip("jax", reason="needs jax: make test-jax")

HEAD = """
import os, signal, sys, time
import jax
from jax import numpy as jnp
import numpy as np
import farandole.jax as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
total = size * (size - 1) / 2
def sum_(x, **options):
    return hvd.allreduce(x, op=hvd.Sum, **options)
"""
# One thread for all that XLA runs: who blocks it must not wait for what only that thread can do.
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "NPROC": "1",
    "JAX_PLATFORMS": "cpu",
}
Start = Callable[..., MpiJob]


def test_many_at_once_with_one_thread(mpi_ranks: Start) -> None:
    program = """
@jax.jit
def step(xs):
    first = [sum_(x * (i + 1)) for i, x in enumerate(xs)]
    return [sum_(jnp.sin(x @ x)) for x in first[::-1]]

@jax.jit
def slow(x):
    return sum_(jax.lax.fori_loop(0, 3000 if rank % 2 else 30, lambda _, y: jnp.tanh(y @ y), x))

for turn in range(2):
    late = slow(jnp.eye(48))
    xs = [jnp.full((20 + i, 20 + i), 1e-3 * rank) for i in range(40)]
    found = step(xs)
    soon = [jax.jit(lambda x: sum_(x + 1))(jnp.full(1000, float(rank))) for _ in range(4)]
    for i, y in enumerate(reversed(found)):
        n, value = 20 + i, 1e-3 * total * (i + 1)
        np.testing.assert_allclose(y[0, 0], size * np.sin(n * value * value), rtol=1e-4)
    assert [float(y[0]) for y in soon] == [total + size] * 4
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
threads = sum("XLAEigen" in name for name in names)
print(f"rank {rank} is right, with {threads} threads.", flush=True)
"""
    result = mpi_ranks(HEAD + program, 3, ONE_THREAD).finish(120)
    assert result.returncode == 0, result.out
    assert len(re.findall(r"rank \d is right", result.out)) == 3, result.out
    assert set(re.findall(r"(\d+) threads", result.out)) == {"1"}, result.out


def test_a_dead_rank_within_jit(mpi_ranks: Start) -> None:
    program = """
step = jax.jit(lambda x: sum_(jnp.sin(x)))
step(jnp.ones(1 << 16)).block_until_ready()
hvd.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        step(jnp.ones(1 << 16)).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(f"rank {rank} got {error}".replace("\\n", " "), flush=True)
    os._exit(3)
"""
    args = ("--continuous",)  # of PRRTE: the others go on
    result = mpi_ranks(HEAD + program, 3, {"JAX_PLATFORMS": "cpu"}, args).finish(60)
    told = re.findall(r"rank (\d) got .*farandole\.PeerError.*rank 1", result.out)
    assert sorted(told) == ["0", "2"], result.out


def test_programs_under_way_at_the_end(mpi_ranks: Start) -> None:
    """Nobody waits for their results; the process ends as if it had."""
    program = """
step = jax.jit(lambda x: sum_(jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x)))
for _ in range(5):
    kept = step(jnp.ones((64, 64)))
print(f"rank {rank} ends.", flush=True)
"""
    result = mpi_ranks(HEAD + program, 3, {"JAX_PLATFORMS": "cpu"}).finish(60)
    assert result.returncode == 0, result.out
    assert len(re.findall(r"rank \d ends\.", result.out)) == 3
    assert "Error" not in result.out, result.out


def test_shutdown_and_init_again(mpi_ranks: Start) -> None:
    program = """
step = jax.jit(sum_)
for turn in range(3):
    assert float(step(jnp.float32(rank + turn))) == total + turn * size
    hvd.shutdown()
    try:
        step(jnp.float32(1)).block_until_ready()
        raise SystemExit("no error")
    except jax.errors.JaxRuntimeError as error:
        assert "farandole.ShutdownError" in str(error), error
    hvd.init()
assert float(step(jnp.float32(rank))) == total
print(f"rank {rank} is right.", flush=True)
"""
    result = mpi_ranks(HEAD + program, 2, {"JAX_PLATFORMS": "cpu"}).finish(60)
    assert result.returncode == 0, result.out
    assert len(re.findall(r"rank \d is right", result.out)) == 2, result.out
