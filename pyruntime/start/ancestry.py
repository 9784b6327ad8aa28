# SPDX-License-Identifier: Apache-2.0
"""Whether this process is a rank itself, or the child of one, which must not meet the others.

A child inherits the launcher's variables: MPI would take it for its parent. So a rank leaves a mark
in its environment that its children inherit too: its process, its rank, and what its launcher has
told it. A child whose launcher variables are the same was not started by a launcher of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from farandole._library import check_count, ffi, lib
from farandole.errors import ShutdownError

__all__ = ["check", "claim"]

_MARK = "_FARANDOLE_RANK_PROCESS"  # no setting: only init() writes and reads it

# What launchers tell a process about itself and nobody else, or about the job that it belongs to.
_TOLD = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid"),
    *("PMI_RANK", "PMI_ID", "PMI_FD", "PMI_PORT", "PMI_JOBID", "MV2_COMM_WORLD_RANK"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "FARANDOLE_RENDEZVOUS", "FARANDOLE_RANK"),
)
# Of these a process that nobody launched has none; a batch script has Slurm's others.
_LAUNCHED = (
    *("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID", "MV2_COMM_WORLD_RANK"),
    *("SLURM_STEP_ID", "FARANDOLE_RENDEZVOUS"),
)
_RANKS = ("FARANDOLE_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

_forked = False


def _this_process() -> str:
    """Its number, and when it began: the number alone comes again."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return f"{os.getpid()}@{fields[19]}"


def _told() -> str:
    """The launcher's words; empty: there is no launcher."""
    if not any(os.environ.get(name) for name in _LAUNCHED):
        return ""
    found = [f"{name}={os.environ[name]}" for name in _TOLD if os.environ.get(name)]
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdigit():  # Hydra numbers them alike in every job
        try:
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        except OSError:  # a child without it: as its parent
            found.append(os.environ.get(_MARK, "").rpartition(" ")[2])
    return " ".join(found)


def claim() -> None:
    """This process is a rank from here on: its children will know. Nothing without a launcher."""
    if told := _told():
        os.environ[_MARK] = f"{_this_process()} {told}"


def check() -> None:
    """Raises ShutdownError, with the remedy, in a process that is only the child of a rank."""
    if _forked:
        check_count(lib.farandole_counters(ffi.NULL, 0))  # the core says what is wrong
    parent, _, told = os.environ.get(_MARK, "").partition(" ")
    inherited = bool(parent) and parent != _this_process() and told == _told()
    if not inherited:
        return
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "?")
    raise ShutdownError(
        f"process {os.getpid()} is a child of rank {rank} (process {parent.partition('@')[0]}) and "
        "can't be a rank too: the launcher knows one process of each rank. Remedy: call init() "
        "under `if __name__ == '__main__':` only, which children started by 'spawn' skip, and hand "
        "rank() and size() to them as arguments; a child that is to be a world of its own is "
        "started without the launcher's variables (env -u OMPI_COMM_WORLD_RANK -u PMIX_NAMESPACE "
        f"-u PMIX_RANK -u {_MARK} ...)"
    )


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
