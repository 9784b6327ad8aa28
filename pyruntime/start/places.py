# SPDX-License-Identifier: Apache-2.0
"""Derives torchrun's variables from a launcher's variables, for ranks that cannot use MPI.

The bootstrap uses it, and `farandole run` uses it to name the first host.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from farandole.start.launchers import SRUN, LauncherVariables

REMEDY = (
    "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there, the same "
    "for all ranks"
)
# Lists of variables. If all variables of a list are set, they identify one start of ranks.
_STARTS = (SRUN.job.split(), ["PALS_APID"])
_PORTS = range(20_000, 32_000)  # outside the kernel's ephemeral range


def stand_in(found: LauncherVariables) -> bool:
    """Sets torchrun's missing variables, if ranks can meet by TCP with this launcher's variables.

    Otherwise, returns False and does not set any variable.
    """
    place = {name: str(value) for name, value in found.place.items()}
    if found.rank < 0 or "LOCAL_WORLD_SIZE" not in place:
        return False
    alone = found.place["LOCAL_WORLD_SIZE"] == found.size
    step = os.environ.get("SLURM_STEP_NODELIST", "")
    first = "localhost" if alone else first_of_allocation(step)
    address = os.environ.get("MASTER_ADDR") or first
    port = os.environ.get("MASTER_PORT") or _port()
    if not address or not port:
        return False
    for name, value in {**place, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        os.environ[name] = os.environ.get(name) or value
    return True


def _port() -> str:
    """Returns the port that all ranks of one start derive.

    Returns "" if the launcher does not identify the start of ranks.
    """
    for names in _STARTS:
        values = [os.environ.get(name, "") for name in names]
        if all(values):
            digest = hashlib.sha256("\0".join(values).encode()).digest()
            return str(_PORTS[int.from_bytes(digest[:4], "big") % len(_PORTS)])
    return ""


def first_of_allocation(step: str = "") -> str:
    """Returns the first host of Slurm's list `step`, or of the allocation if `step` is empty.

    Returns "" if the host is unknown.
    """
    environ = os.environ
    slurm = step or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if found := re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", slurm):  # rack[01-04,7]n,other
        return "".join(part or "" for part in found.groups())
    lines = Path(environ["PBS_NODEFILE"]) if "PBS_NODEFILE" in environ else None
    if lines is not None and lines.is_file():
        return lines.read_text().partition("\n")[0].strip()
    return environ.get("LSB_HOSTS", "").partition(" ")[0]
