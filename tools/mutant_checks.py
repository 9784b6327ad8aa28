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
PROCESS = " ".join(
    [
        *(f"tests/single/test_{name}.py" for name in ("arena", "flight_calls", "forks")),
        *(
            f"tests/parallel/test_{name}.py"
            for name in ("lifecycle", "memory_in_use", "metrics", "zero_copy")
        ),
        "tests/faults/test_flight.py",
    ]
)
# Path prefix -> checks, quickest first. The longest prefix that matches counts. A check is a C++
# program with arguments, or files for pytest on two ranks.
CHECKS: dict[str, Sequence[str]] = {
    "csrc/api": ("runtime_test batch forked refusal", "runtime_test", CALLS, PROCESS),
    "csrc/api/api_gpu": ("gpu_runtime_test",),
    "csrc/api/api_xla": ("xla_test", "gpu_runtime_test"),
    "csrc/base": ("config_test", "flight_test", "runtime_test", CALLS),
    "csrc/base/json": ("timeline_test", "flight_test"),
    "csrc/base/logging": ("logging_test", "runtime_test", PROCESS),
    "csrc/base/own_file": ("own_file_test", "runtime_test"),
    "csrc/control": (
        *("coordinator_test", "aggregator_test", "message_test"),
        *("simulation_test --seeds 300 small", "runtime_test", CALLS),
    ),
    "csrc/control/bootstrap": ("host_links_test", "runtime_test"),
    "csrc/control/channel": ("shm_channel_test", "runtime_test"),
    "csrc/control/channel/host_channel": ("host_channel_test", "runtime_test"),
    "csrc/control/hosts": (
        *("aggregator_test", "host_controller_test", "simulation_test --seeds 300 small"),
        *("runtime_test", CALLS),
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
    "csrc/kernels": ("finite_test", "coordinator_test", "kernels_test", "shm_backend_test"),
    "csrc/lib/gpu": ("nccl_backend_test", "gpu_lane_test", "gpu_runtime_test"),
    "csrc/lib/gpu/nvrtc": ("kernel_cache_test", "gpu_kernels_test", "gpu_runtime_test"),
    "csrc/lib/ipc/arena": ("arena_test", "zero_copy_test", "runtime_test", PROCESS),
    "csrc/lib/ipc/ring": ("shm_channel_test", "ring_test"),
    "csrc/lib/ipc/segment": ("segment_test", "runtime_test"),
    "csrc/lib/ipc/socket_folder": ("socket_folder_test", "tests/faults/test_sockets.py"),
    "csrc/lib/ipc/unix_socket": ("unix_socket_test", "host_links_test", "runtime_test"),
    "csrc/lib/mpi": ("mpi_test", CALLS),
    "csrc/lib/net": ("host_channel_test", "tcp_wire_test", "runtime_test"),
    "csrc/lib/net/interfaces": ("interfaces_test", "runtime_test"),
    "csrc/lib/os": ("process_test", "thread_test", "poller_test", "runtime_test"),
    "csrc/lib/os/dl": ("dl_test", "mpi_test", "nccl_backend_test"),
    "csrc/lib/os/fd": ("runtime_test forked", "runtime_test", "tests/single/test_forks.py"),
    "csrc/lib/os/futex": ("spin_test", "event_count_test"),
    "csrc/lib/os/memory": ("segment_test", "arena_test", "runtime_test"),
    "csrc/lib/os/text_file": ("text_file_test", "kernel_cache_test"),
    "csrc/runtime": (
        *("lanes_test", "job_state_test", "memory_in_use_test"),
        *("simulation_test --seeds 300 small", "runtime_test", "gpu_runtime_test", CALLS),
    ),
    "csrc/runtime/calls/request_checks": (
        *("runtime_test", "finite_test"),
        *("tests/parallel/test_numerics.py", CALLS),
    ),
    "csrc/runtime/gpu": ("gpu_runtime_test",),
    "csrc/watch": ("flight_test", "runtime_test", PROCESS),
    "csrc/watch/deaths": ("runtime_test death", "runtime_test"),
    "csrc/watch/stack_reporter": ("stack_reporter_test", "tests/faults/test_stalls.py"),
    "csrc/watch/timeline": ("timeline_test", "tests/parallel/test_timeline.py"),
}


def checks_of(path: str) -> Sequence[str]:
    """The checks for the source file `path`."""
    return CHECKS[max((prefix for prefix in CHECKS if path.startswith(prefix)), key=len)]
