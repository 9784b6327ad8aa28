# SPDX-License-Identifier: Apache-2.0
"""Doubles of launchers that can't be had here: Slurm's srun, PALS's mpiexec, and another one that
knows PMI. Each takes that launcher's documented options and no other, gives
its ranks that launcher's variables, and ends with its exit code; none speaks a protocol of MPI's
bootstrap. DOUBLE_NODES=n lays the ranks out on n nodes, which are all this machine.

Run as a program: the name by which it is called says which launcher it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PLUGINS = "MPI plugin types are...\n\tnone\n\tpmi2\n\tcray_shasta\n\tpmix"
_VALUED = {
    "srun": (
        *("--ntasks", "--mpi", "--export", "--cpu-bind"),
        *("--nodes", "--ntasks-per-node", "--nodelist"),
    ),
    "pals": ("-n", "--ppn", "--hosts", "--cpu-bind"),
    "other": ("-n",),
}
_FLAGS = {"srun": ("--label", "--overcommit")}


def install(folder: Path, name: str, kind: str) -> str:
    """A program `name` in the folder that is the double of `kind`; its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {kind} "$@"\n')
    path.chmod(0o755)
    return str(path)


def _parsed(kind: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options, and what follows them; ends with 1 for an unknown option, as these launchers do."""
    found = {}
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if name in _FLAGS.get(kind, ()):
            continue
        if name not in _VALUED[kind]:
            sys.exit(f"{kind}: unrecognized option '{name}'")
        found[name] = value if equals else words.pop(0)
    return found, words


def _place(kind: str, rank: int, size: int, nodes: int, mpi: str) -> dict[str, str]:
    here = size // nodes  # ranks in blocks, as each of them lays them out by default
    node, local = rank // here, rank % here
    pmi = {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    if kind == "srun":
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": str(os.getpid()),
            "SLURM_STEP_NODELIST": "localhost" + ",n2" * (nodes - 1),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{nodes})" if nodes > 1 else str(here),
        }
        return slurm | (pmi if mpi == "pmi2" else {})
    if kind == "pals":
        places = {"PMI_LOCAL_RANK": str(local), "PMI_LOCAL_SIZE": str(here)}
        places |= {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(local)}
        return pmi | places | {"PALS_APID": f"a-{os.getpid()}", "PALS_NODEID": str(node)}
    return pmi | {"MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": str(here)}


def main(kind: str, words: list[str]) -> int:
    """Starts the ranks; the largest of their exit codes."""
    answers: dict[str, Callable[[], str]] = {
        "--mpi=list": lambda: os.environ.get("DOUBLE_PLUGINS", PLUGINS),
        "--version": lambda: f"{kind} 1.2",
    }
    if words[0] in answers:
        print(answers[words[0]]())
        return 0
    options, command = _parsed(kind, words)
    size = int(next(options[x] for x in ("-n", "-np", "--ntasks") if x in options))
    nodes = int(os.environ.get("DOUBLE_NODES", "1"))
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **_place(kind, rank, size, nodes, options.get("--mpi", "none"))},
        )
        for rank in range(size)
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
