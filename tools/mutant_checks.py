# SPDX-License-Identifier: Apache-2.0
"""C++ files and folders -> the programs with which tools/mutate.py judges their mutants."""

from __future__ import annotations

from collections.abc import Sequence

CALLS = " ".join(
    f"tests/parallel/test_{name}.py"
    for name in (
        "collectives",
        "calls",
        "errors",
        "disagreements",
        "process_sets",
        "uneven",
        "point_to_point",
    )
)
# Path prefix -> checks, quickest first. The longest prefix that matches counts. A check is a C++
# program with arguments, or files for pytest on two ranks.
CHECKS: dict[str, Sequence[str]] = {
    "csrc/control": (
        *("coordinator_test", "aggregator_test", "message_test"),
        *("simulation_test --seeds 300 small", "runtime_test", CALLS),
    ),
    "csrc/control/bootstrap": ("runtime_test",),
    "csrc/control/channel": ("shm_channel_test", "runtime_test"),
    "csrc/control/channel/host_channel": ("host_channel_test", "runtime_test"),
    "csrc/control/hosts": (
        *("aggregator_test", "simulation_test --seeds 300 small", "runtime_test", CALLS),
    ),
    "csrc/data": (
        *("shm_schedule_test", "shm_backend_test", "zero_copy_test", "runtime_test", CALLS),
    ),
    "csrc/data/hierarchical": (
        *("hierarchical_schedule_test", "hierarchical_backend_test", "tcp_wire_test"),
    ),
    "csrc/data/hierarchical/mpi": ("mpi_test",),
    "csrc/data/hierarchical/tcp": ("tcp_wire_test", "runtime_test"),
    "csrc/data/gpu": ("gpu_lane_test", "nccl_backend_test", "gpu_runtime_test"),
    "csrc/data/gpu/gpu_module": ("kernel_cache_test",),
    "csrc/data/nccl": ("nccl_backend_test", "gpu_runtime_test"),
    "csrc/runtime": ("runtime_test", "gpu_runtime_test", CALLS),
    "csrc/runtime/calls/request_checks": (
        *("runtime_test", "finite_test"),
        *("tests/parallel/test_numerics.py", CALLS),
    ),
    "csrc/runtime/gpu": ("gpu_runtime_test",),
}


def checks_of(path: str) -> Sequence[str]:
    """The checks for the source file `path`."""
    return CHECKS[max((prefix for prefix in CHECKS if path.startswith(prefix)), key=len)]
