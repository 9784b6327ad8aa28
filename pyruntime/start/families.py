# SPDX-License-Identifier: Apache-2.0
"""The families of MPI libraries, by what a library says of itself, and how Slurm starts each. For
the launchers, doctor and the bootstrap's errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Libraries with one binary interface, and one way to be started."""

    name: str
    says: tuple[str, ...]  # one of these is in MPI_Get_library_version's text
    srun: tuple[str, ...] = ()  # values of srun's --mpi that its ranks understand, the best first

    def plugin(self, known: str) -> str:
        """Its value of --mpi, of those that `srun --mpi=list` shows; "": none."""
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
    """Of the library that says so of itself; UNKNOWN for others and for none."""
    return next((x for x in FAMILIES if any(word in version for word in x.says)), UNKNOWN)
