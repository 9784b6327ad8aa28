# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, or ends with an error, while the others wait inside tf.function."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from harness.fork import ForkJob

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None, reason="needs TensorFlow: make test-tensorflow"
)
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

PROGRAM = """
import os, signal, sys
import tensorflow as tf
import farandole.tensorflow as hvd

hvd.init()

@tf.function
def step(x):
    for i in range(5):
        x += hvd.allreduce(x)
    return x

x = tf.ones(100)
step(x)
if hvd.rank() == 1:
    print("ready", flush=True)
    WAITS
try:
    print("ready", flush=True)
    step(x)
except tf.errors.OpError as error:
    print(f"told: {str(error)!r}", flush=True)
    os._exit(7)
"""


@pytest.mark.parametrize(("killed", "ranks"), [(True, 3), (False, 2)])
def test_a_rank_that_ends(fork_ranks: Callable[..., ForkJob], killed: bool, ranks: int) -> None:
    program = PROGRAM.replace("WAITS", "signal.pause()" if killed else 'raise ValueError("my bug")')
    job = fork_ranks(program, ranks, ENVIRONMENT)
    job.wait_for_output("ready", timeout=200.0)
    if killed:
        job.kill(1, signal.SIGKILL)
    results = job.finish(timeout=60.0)
    for rank in set(range(ranks)) - {1}:
        out = results[rank].out
        assert results[rank].returncode == 7, out
        assert re.search("told: .*PeerError: .*rank 1", out), out
    if not killed:
        assert "my bug" in results[0].out
