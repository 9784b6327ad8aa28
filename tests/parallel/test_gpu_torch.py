# SPDX-License-Identifier: Apache-2.0
"""The torch tests once more, on tensors that farandole takes for tensors on GPUs (the double)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import farandole.torch as hvd
from harness.torch_on_double import gpu, pretend
from harness.toys import total

pretend()

# Not bucket_view: its places are memory of the CPU.
_FILES = (
    *(
        "adasum",
        "amp",
        "arrivals",
        "changes",
        "functions",
        "gradients",
        "ops",
        "optimizer",
        "sparse",
    ),
    *("sync_batch_norm", "timeout", "weights", "wrapping"),
)
_LEFT_OUT = ("test_cost_of_hooks",)  # of the CPU's path


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    torch.set_num_threads(1)


def _load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"test_{name}.py")
    spec = importlib.util.spec_from_file_location(f"on_double_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Of their fixtures only those that a test asks for: one for all tests of a file would be one for
# all tests here.
for _name in _FILES:
    _module = _load(f"torch_{_name}")
    for _test, _function in vars(_module).items():
        if _test.startswith("test_") and _test not in _LEFT_OUT:
            globals()[f"test_{_name}_{_test[5:]}"] = _function
    if _name == "wrapping":
        momentum = _module.momentum

test_adasum_of_tensors = _load("adasum").test_torch


def test_tensors_are_reduced_by_the_double() -> None:
    """Else all of the above would be about the CPU."""
    x = torch.full((5,), 12.0 * (1 + hvd.rank()))
    gate = gpu().gate(gpu().stream)  # what makes x, as it were
    handle = hvd.allreduce_async_(x, postscale_factor=2.0)
    hvd.barrier()  # the host has long been able to
    assert x.tolist() == [12.0 * (1 + hvd.rank())] * 5
    gpu().open(gate)
    assert hvd.synchronize(handle) is x
    assert x.tolist() == [2 * total(hvd.Average, [0])] * 5
