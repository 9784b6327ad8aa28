# SPDX-License-Identifier: Apache-2.0
"""Accelerate's scripts, which its release brings. The others of them are about GPUs, or fetch data
sets."""

from clients.suite import Suite

_SCRIPTS = "accelerate.test_utils.scripts"
SUITES = (
    Suite(
        "accelerate",
        "its own test scripts, on DDP",
        ("accelerate==1.15.0",),
        "group",
        "modules",
        (
            f"{_SCRIPTS}.test_script",
            f"{_SCRIPTS}.test_ops",
            f"{_SCRIPTS}.test_sync",
            f"{_SCRIPTS}.test_distributed_data_loop",
        ),
        quick=True,
        environment={"ACCELERATE_USE_CPU": "1"},
        known={
            "test_distributed_data_loop": "`join_uneven_inputs` does nothing on CPU, as Accelerate "
            "warns; the ranks then make different calls: MismatchError"
        },
    ),
)
