# SPDX-License-Identifier: Apache-2.0
"""mpi4py's tests beside farandole, which shares MPI with it. Left out: what needs no other rank."""

from clients.suite import OWN_ROOT, Suite

SUITES = (
    Suite(
        "mpi4py",
        "its tests of collectives and messages, after farandole.init()",
        ("mpi4py==4.1.2",),
        "init",
        "pytest",
        (*OWN_ROOT, "{source}/test"),
        select="cco or p2p",
        sdist=True,
        quick=True,
    ),
)
