# SPDX-License-Identifier: Apache-2.0
"""Families of MPI libraries, by their version text, and how Slurm starts each. Used by launchers,
doctor and the bootstrap's errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Libraries that share a binary interface and a way to be started."""

    name: str
    says: tuple[str, ...]  # one of these is in the text of MPI_Get_library_version
    srun: tuple[str, ...] = ()  # suitable values of srun's --mpi, best first

    def plugin(self, known: str) -> str:
        """Best value of --mpi among those that `srun --mpi=list` prints; "" if none fits."""
        words = known.replace(",", " ").split()
        return next((x for x in self.srun if x in words), "")


UNKNOWN = Family("no MPI", ())
FAMILIES = (
    Family("Open MPI", ("Open MPI",), ("pmix",)),
    Family("Cray MPICH", ("CRAY MPICH",), ("cray_shasta", "pmi2")),
    # Most are built without PMIx.
    Family("MPICH", ("MPICH", "Intel(R) MPI", "MVAPICH", "ParaStation"), ("pmi2",)),
)


def family(version: str) -> Family:
    """Returns the family of the library with this version text, or UNKNOWN."""
    return next((x for x in FAMILIES if any(word in version for word in x.says)), UNKNOWN)
