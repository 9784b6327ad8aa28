# SPDX-License-Identifier: Apache-2.0
"""The checks that tools/mutate.py judges a mutant by: those of its file, or of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial


def _files(folder: str, names: str) -> str:
    return " ".join(f"tests/{folder}/{name}.py" for name in names.split())


_single, _parallel = partial(_files, "single"), partial(_files, "parallel")

_LIFE = _files("faults", "test_meeting test_leaving")
_WORLDS = _files("jobs", "test_worlds")
_DOCTOR = _single("test_doctor test_doctor_gpu")
_TORCH = _parallel("test_torch_optimizer test_torch_changes test_torch_arrivals")
_TORCH_REST = _parallel(
    "test_torch_gradients test_torch_kept test_torch_complete test_torch_ops test_torch_strangers"
)
_GROUPS = _parallel("test_torch_distributed test_torch_distributed_groups")
# One by one: alone, a file of these does not import torch.
_NUMPY = tuple(map(_parallel, ("test_objects", "test_uneven", "test_errors", "test_calls")))

# What judges a mutant, the quickest first: the longest prefix of its path counts. A check is a C++
# program with its arguments, or files for pytest, those of tests/parallel on two ranks.
CHECKS: dict[str, Sequence[str]] = {
    "csrc/control": (
        *("coordinator_test", "prediction_test", "aggregator_test", "message_test"),
        *("simulator_test --seeds 1000 small", "runtime_test"),
    ),
    "csrc/control/bootstrap": ("runtime_test",),
    "csrc/control/channel": ("shm_channel_test", "runtime_test"),
    "csrc/control/channel/host_channel": ("host_channel_test", "runtime_test"),
    "csrc/control/hosts": (
        *("aggregator_test", "simulator_test --seeds 1000 small", "runtime_test"),
    ),
    "csrc/data": ("shm_schedule_test", "shm_backend_test", "zero_copy_test", "runtime_test"),
    "csrc/data/hierarchical": (
        *("hierarchical_schedule_test", "hierarchical_backend_test", "tcp_wire_test"),
    ),
    "csrc/data/hierarchical/mpi": ("mpi_test",),
    "csrc/data/hierarchical/tcp": ("tcp_wire_test", "runtime_test"),
    "csrc/data/gpu": ("gpu_adasum_test", "gpu_lane_test", "nccl_backend_test", "gpu_runtime_test"),
    "csrc/data/gpu/gpu_module": ("kernel_cache_test", "gpu_adasum_test"),
    "csrc/data/nccl": ("nccl_split_test", "nccl_backend_test", "gpu_runtime_test"),
    "csrc/runtime": ("runtime_test", "gpu_runtime_test"),
    "csrc/runtime/calls/numerics": ("finite_test", _parallel("test_numerics")),
    "csrc/runtime/gpu": ("gpu_runtime_test",),
    "pyruntime": (
        *_NUMPY,
        *map(_parallel, ("test_process_sets", "test_join", "test_lifecycle")),
        _LIFE,
    ),
    "pyruntime/adasum": (_parallel("test_adasum"), _parallel("test_torch_adasum")),
    "pyruntime/arrays": (_single("test_arena test_torch_kind"), *_NUMPY, _parallel("test_leases")),
    "pyruntime/arrays/cuda_array": (_parallel("test_gpu_arrays"),),
    "pyruntime/arrays/dlpack": (_parallel("test_gpu_arrays"),),
    "pyruntime/calls": (*_NUMPY, _parallel("test_leases"), _parallel("test_repeats test_threads")),
    "pyruntime/calls/handles": (_NUMPY[2], _parallel("test_threads"), _parallel("test_leases")),
    "pyruntime/calls/public_call": (_single("test_arguments"), *_NUMPY[2:]),
    "pyruntime/calls/repeats": (_parallel("test_repeats"),),
    "pyruntime/calls/rounds": (_parallel("test_torch_complete test_torch_optimizer"),),
    "pyruntime/calls/arguments": (_single("test_arguments"), _parallel("test_arguments")),
    "pyruntime/worlds": (_WORLDS,),
    "pyruntime/elastic": (_parallel("test_elastic"), _files("faults", "test_elastic_errors")),
    "pyruntime/exchange": (*map(_parallel, ("test_scatter", "test_uneven", "test_calls")),),
    "pyruntime/launch": (_single("test_launch"), _single("test_run_function")),
    "pyruntime/members": (_parallel("test_process_sets"), _parallel("test_arguments")),
    "pyruntime/messages": (_parallel("test_point_to_point"),),
    "pyruntime/as_horovod": (_files("jobs", "test_as_horovod"),),
    "pyruntime/observe": (
        *(_single("test_timeline"), _parallel("test_metrics"), _parallel("test_timeline")),
        _files("faults", "test_flight test_observing"),
    ),
    "pyruntime/observe/metrics": (_parallel("test_metrics"),),
    "pyruntime/observe/prometheus": (_parallel("test_metrics"),),
    "pyruntime/observe/trace": (_single("test_timeline"), _parallel("test_timeline")),
    "pyruntime/observe/explain": (_files("faults", "test_flight test_observing"),),
    "pyruntime/observe/flight": (_files("faults", "test_flight test_observing"),),
    "pyruntime/observe/top": (_files("faults", "test_observing"),),
    "pyruntime/ops": (_parallel("test_calls"), _parallel("test_collectives test_torch_ops")),
    "pyruntime/parameter_s": (
        _parallel("test_parameter_server test_parameter_server_refuses"),
        _files("faults", "test_parameter_server"),
    ),
    "pyruntime/parameters": (_parallel("test_torch_functions"),),
    "pyruntime/start": (*_NUMPY[:1], _parallel("test_lifecycle"), _LIFE),
    "pyruntime/runtime": (_parallel("test_lifecycle"), _LIFE),
    "pyruntime/start/joining": (_files("jobs", "test_recruits"), _WORLDS),
    "pyruntime/start/recruits": (_files("jobs", "test_recruits"), _WORLDS),
    "pyruntime/start/survivors": (_WORLDS,),
    "pyruntime/start/launchers": (_files("jobs", "test_torchrun"),),
    "pyruntime/start/mpi_waits": (_LIFE,),
    "pyruntime/start/torchrun": (_files("jobs", "test_torchrun"),),
    "pyruntime/tools": (_single("test_command"), _single("test_bench"), _DOCTOR),
    "pyruntime/tools/bench": (_single("test_bench"), _parallel("test_bench")),
    "pyruntime/tools/doctor": (_DOCTOR,),
    "pyruntime/tools/run": (_single("test_launch"),),
    "pyruntime/tools/tune": (_parallel("test_tune"),),
    "adapters/numpy": (_single("test_numpy_helpers"),),
    "adapters/cupy": (_single("test_neutral_calls"), _parallel("test_gpu_arrays")),
    "adapters/jax": (_files("with_jax", "test_jax_gradients test_jax_programs test_jax_errors"),),
    "adapters/keras": (_files("with_keras", "test_keras"),),
    "adapters/tensorflow": (
        _files("with_tensorflow", "test_tf_graphs test_tf_training test_tf_errors"),
    ),
    "adapters/torch": (_TORCH, _TORCH_REST),
    "adapters/torch/adasum": (_parallel("test_torch_adasum"),),
    "adapters/torch/gradients/arrivals": (
        _parallel("test_torch_arrivals test_torch_optimizer"),
        _TORCH_REST,
    ),
    "adapters/torch/gradients/bucket_view": (_parallel("test_torch_bucket_view"),),
    "adapters/torch/checkpoints": (
        _parallel("test_torch_checkpoint test_torch_checkpoint_errors"),
        _files("faults", "test_checkpoint_kills"),
    ),
    "adapters/torch/cuda": (_parallel("test_gpu_torch"),),
    "adapters/torch/ddp_hook": (_parallel("test_torch_ddp_hook"),),
    "adapters/torch/distributed": (
        *(_GROUPS, _parallel("test_torch_distributed_messages test_torch_distributed_ddp")),
    ),
    "adapters/torch/diloco": (_parallel("test_torch_diloco"),),
    "adapters/torch/periods": (_parallel("test_torch_diloco"),),
    "adapters/torch/elastic": (_parallel("test_elastic test_torch_restart"),),
    "adapters/torch/feedback": (_parallel("test_torch_feedback test_torch_feedback_use"),),
    "adapters/torch/functions": (_parallel("test_torch_functions"),),
    "adapters/torch/kind": (_single("test_torch_kind"), _TORCH),
    "adapters/torch/mpi_ops": (_parallel("test_torch_ops"), _TORCH),
    "adapters/torch/gradients/passes": (
        _parallel("test_torch_complete test_torch_optimizer"),
        _TORCH_REST,
    ),
    "adapters/torch/gradients/pending": (
        _parallel("test_torch_changes test_torch_gradients"),
        _TORCH_REST,
    ),
    "adapters/torch/gradients/rows": (_parallel("test_torch_sparse"),),
    "adapters/torch/sampler": (_single("test_sampler"), _parallel("test_elastic")),
    "adapters/torch/sharded": (
        *map(_parallel, ("test_torch_sharded", "test_torch_sharded_strangers")),
        _parallel("test_torch_sharded_state"),
    ),
    "adapters/torch/storages": (_parallel("test_leases test_torch_wrappers"),),
    "adapters/torch/collectives/scatter": (_parallel("test_scatter"),),
    "adapters/torch/collectives/sparse": (_parallel("test_torch_sparse"),),
    "adapters/torch/state": (_parallel("test_torch_functions"),),
    "adapters/torch/sync_batch_norm": (_parallel("test_torch_sync_batch_norm"),),
}


def checks_of(path: str) -> Sequence[str]:
    """The checks of a file."""
    return CHECKS[max((prefix for prefix in CHECKS if path.startswith(prefix)), key=len)]
