# SPDX-License-Identifier: Apache-2.0
"""Distinguishes ranks from their child processes, which must not call init().

A child inherits the launcher's variables, so MPI would mistake the child for its parent. Therefore
each rank records its process and its launcher's variables in RANK_PROCESS. If a process inherits
RANK_PROCESS and has the same launcher's variables, a rank has started it. The bootstrap uses this.
"""

from __future__ import annotations

import os
from pathlib import Path

from farandole._library import check_count, ffi, lib
from farandole.errors import LibraryError, ShutdownError
from farandole.start import launchers
from farandole.start.launchers import RANK_PROCESS
from farandole.start.siblings import stat

# Variables by which launchers identify a process, or its job.
_TOLD = launchers.names("size_variable", "rank_variable", "marks", "job")

_forked = False


def _this_process() -> str:
    """Returns this process's pid and start time, because pids are reused.

    Raises LibraryError if there is no /proc.
    """
    if (found := stat(os.getpid())) is None:
        raise LibraryError(
            "init(): farandole needs /proc, where ranks see each other's processes. Remedy: "
            "mount it (`mount -t proc proc /proc`), also in the container"
        )
    return f"{os.getpid()}@{found.start}"


def _launcher_values() -> str:
    """Returns the launcher's variables as text, or "" if there is no launcher."""
    if not any(os.environ.get(name) for name in launchers.names("marks")):
        return ""
    found = [f"{name}={os.environ[name]}" for name in _TOLD if os.environ.get(name)]
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdigit():  # Hydra's number is the same in every job
        try:
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        except OSError:  # if a child lacks the descriptor, uses its parent's value
            found.append(os.environ.get(RANK_PROCESS, "").rpartition(" ")[2])
    return " ".join(found)


def claim() -> None:
    """Marks this process as a rank in the environment, where its children look for the mark.

    Does nothing without a launcher.
    """
    if values := _launcher_values():
        os.environ[RANK_PROCESS] = f"{_this_process()} {values}"


def renew() -> None:
    """Marks a rank again, after its launcher's variables have been completed."""
    if os.environ.get(RANK_PROCESS, "").partition(" ")[0] == _this_process():
        claim()


def is_of_rank() -> bool:
    """Returns True if a rank, rather than the launcher, has started this process."""
    parent = os.environ.get(RANK_PROCESS, "").partition(" ")[0]
    return bool(parent) and parent != _this_process()


def check() -> None:
    """Raises ShutdownError, with a remedy, if this process is the child of a rank."""
    if _forked:
        check_count(lib.farandole_counters(ffi.NULL, 0))  # raises the core's error
    parent, _, values = os.environ.get(RANK_PROCESS, "").partition(" ")
    inherited = bool(parent) and parent != _this_process() and values == _launcher_values()
    if not inherited:
        return
    rank = next((row.rank for row in launchers.LAUNCHERS if row.rank >= 0), "?")
    raise ShutdownError(
        f"process {os.getpid()} is a child of rank {rank} (process {parent.partition('@')[0]}) and "
        "can't be a rank too: the launcher knows one process of each rank. Remedy: call init() "
        "under `if __name__ == '__main__':` only, which children started by 'spawn' skip, and pass "
        "rank() and size() to them as arguments. To make a child its own world, start it "
        "without the launcher's variables (env -u OMPI_COMM_WORLD_RANK -u PMIX_NAMESPACE "
        f"-u PMIX_RANK -u RANK -u WORLD_SIZE -u {RANK_PROCESS} ...)"
    )


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
