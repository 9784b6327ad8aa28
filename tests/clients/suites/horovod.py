# SPDX-License-Identifier: Apache-2.0
"""Horovod's own tests, from a copy of its repository: CLIENT_SOURCE=folder. Left out: those of
TensorFlow, Keras and MXNet, and those of its launchers, which import their private parts."""

from typing import Any

from clients.suite import ALONE, Suite

_FRAMEWORKS = ("tensorflow-cpu==2.21.0", "keras==3.15.0")
_TORCH = {
    "test_broadcast_state": "torch's Muon, or state that only Horovod's step makes",
    "test_force_allreduce": "torch's Muon takes two-dimensional parameters only",
    "no_named_parameters": "reads Horovod's private _parameter_names",
    "duplicate_name": "the first call is done before the second, so it is not a duplicate",
    "test_horovod_join_all": "wants zeros of joined ranks, or an error",
    "test_horovod_join_broadcast": "wants an error; the call completes here",
    "reducescatter_async_fused": "calls are done before it asks",
    "synchronize_step_warning": "wants a warning of step() after synchronize(), right here",
}
_PROCESS_SETS = {
    "test_static": "at its end, reads Horovod's private `mpi_ops._basics`",
    "test_multi_comm": "asks for size() after an init() that failed, which starts nothing here",
}


def _suite(file: str, **more: Any) -> Suite:
    arguments = (*ALONE, f"{{source}}/test/{file}")
    fields = {"repository": True, "each": True, "seconds": 90, **more}
    what = file.rpartition("/")[2]
    return Suite("horovod", what, ("mock", *_FRAMEWORKS), "horovod", "pytest", arguments, **fields)


SUITES = (
    _suite("parallel/test_torch.py", known=_TORCH),
    _suite("parallel/test_adasum_pytorch.py"),
    _suite("parallel/test_timeline.py"),
    _suite("parallel/test_process_sets_static.py", known=_PROCESS_SETS),
    _suite("parallel/test_process_sets_multi_comm.py", known=_PROCESS_SETS),
    _suite("integration/test_stall.py"),
    _suite("single/test_torch_elastic.py", ranks=(1,)),
)
