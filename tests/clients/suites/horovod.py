# SPDX-License-Identifier: Apache-2.0
"""Horovod's own tests, from a copy of its repository: CLIENT_SOURCE=folder."""

from typing import Any

from clients.suite import Suite

_TORCH = {
    "test_broadcast_state": "torch's Muon, or state that only Horovod's step makes",
    "test_force_allreduce": "torch's Muon takes two-dimensional parameters only",
    "no_named_parameters": "reads Horovod's private _parameter_names",
    "duplicate_name": "the first call is done before the second, so it is no duplicate",
    "test_horovod_join_all": "wants zeros of joined ranks, or an error",
    "test_horovod_join_broadcast": "wants an error; the call completes here",
    "reducescatter_async_fused": "calls are done before it asks",
    "synchronize_step_warning": "wants a warning of step() after synchronize(), right here",
}


def _suite(file: str, **more: Any) -> Suite:
    arguments = ("--noconftest", "-c", "/dev/null", f"{{source}}/test/{file}")
    fields = {"repository": True, "each": True, "seconds": 60, **more}
    what = file.rpartition("/")[2]
    return Suite("horovod", what, ("mock",), "horovod", "pytest", arguments, **fields)


SUITES = (
    _suite("parallel/test_torch.py", known=_TORCH),
    _suite("parallel/test_adasum_pytorch.py"),
    _suite("parallel/test_torch_elastic.py"),
)
