# SPDX-License-Identifier: Apache-2.0
"""Names and helpers of farandole.numpy, in a world of one, and its example."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import farandole.numpy as hvd
from harness.mpirun import MpiJob

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "numpy_regression.py"


def test_names():
    assert {"allreduce", "broadcast_parameters", "average_gradients"} <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_helpers_in_a_world_of_one():
    hvd.init()
    model = {
        "weight": np.arange(6.0).reshape(2, 3),
        "steps": np.array(7),
        "flags": np.array([True]),
    }
    before = {name: x.copy() for name, x in model.items()}
    hvd.broadcast_parameters(model)
    hvd.broadcast_parameters(list(model.values()))
    hvd.average_gradients({"weight": model["weight"]})
    hvd.average_gradients([model["weight"]], name="gradients")
    for name, x in model.items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_example(ranks):
    expected = re.findall(r"^    (loss \d.*|weights .*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert len(expected) == 2
    with MpiJob([sys.executable, str(EXAMPLE)], ranks) as job:
        assert job.finish(timeout=60).check().out.split("\n")[:2] == expected
