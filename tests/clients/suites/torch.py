# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of c10d's collectives and of DDP, which the installed torch brings. torch
skips what needs a GPU, torchvision or another backend."""

from clients.suite import Suite, program

_GLOO_ONLY = "dist.monitored_barrier() takes groups of gloo only; a group's method is ours"
_PACKAGES = ("torch", "expecttest==0.3.0")
SUITES = (
    Suite(
        "torch",
        "FSDP2, DTensor, tensor parallelism, pipelining, ZeRO; checkpoints",
        _PACKAGES,
        "group",
        "pytest",
        program("torch_parallel"),
        ranks=(2, 4),
        quick=True,
    ),
    Suite(
        "torch",
        "its tests of collectives and DDP (`torch.testing._internal.distributed`)",
        _PACKAGES,
        "none",
        "pytest",
        program("torch_distributed"),
        ranks=(4,),
        launched=False,
        environment={"BACKEND": "farandole", "WORLD_SIZE": "{ranks}"},
        known={
            "test_ddp_logging_data_cpu": "it asks DDP for settings of gloo",
            "test_monitored_barrier_gloo_rank_0_timeout": "it wants gloo's text; ours names who "
            "is missing",
            "test_monitored_barrier_gloo": _GLOO_ONLY,
        },
        seconds=1800,
    ),
)
