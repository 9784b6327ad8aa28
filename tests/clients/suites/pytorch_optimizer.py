# SPDX-License-Identifier: Apache-2.0
"""The optimizers of torch and of five packages, by a program of ours: their own tests use one
process."""

from clients.suite import Suite, program

SUITES = (
    Suite(
        "pytorch-optimizer",
        "all optimizers of torch and of five packages",
        (
            *("pytorch-optimizer==4.1.0", "torch-optimizer==0.3.0", "schedulefree==1.4.1"),
            *("prodigyopt==1.1.2", "lion-pytorch==0.2.5"),
        ),
        "init",
        "pytest",
        program("optimizers"),
        quick=True,
    ),
)
