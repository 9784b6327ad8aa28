# SPDX-License-Identifier: Apache-2.0
"""Families of MPI libraries, identified by version text, and Slurm's option that starts them.

Launchers, doctor and the bootstrap's errors use them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Libraries that share a binary interface and are started in the same way."""

    name: str
    says: tuple[str, ...]  # MPI_Get_library_version's text contains one of these
    srun: tuple[str, ...] = ()  # values for srun's --mpi that fit, best first

    def plugin(self, known: str) -> str:
        """Returns the best value for --mpi that `srun --mpi=list` prints, or "" if none fits."""
        words = known.replace(",", " ").split()
        return next((x for x in self.srun if x in words), "")


UNKNOWN = Family("no MPI", ())
FAMILIES = (
    Family("Open MPI", ("Open MPI",), ("pmix",)),
    Family("Cray MPICH", ("CRAY MPICH",), ("cray_shasta", "pmi2")),
    # Most of these libraries are built without PMIx.
    Family("MPICH", ("MPICH", "Intel(R) MPI", "MVAPICH", "ParaStation"), ("pmi2",)),
)


def family(version: str) -> Family:
    """Returns the family of the library with this version text, or UNKNOWN."""
    return next((x for x in FAMILIES if any(word in version for word in x.says)), UNKNOWN)
