# SPDX-License-Identifier: Apache-2.0
"""A trace of this rank for Chrome or Perfetto, started and stopped at run time."""

from __future__ import annotations

import os

from farandole._library import check, lib
from farandole.topology import is_initialized

__all__ = ["start_timeline", "stop_timeline"]


def _check_running() -> None:
    if not is_initialized():
        raise ValueError("farandole is not initialised: call farandole.init() first")


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts to write a trace: rank 0 to `file_path`, rank N to NAME.rankN.SUFFIX beside it.

    Not collective, and it changes nothing about the work. `mark_cycles` marks each batch of
    decisions that the rank reads. Raises ValueError before init() and where a trace is being
    written, LibraryError where the file can't be made.
    """
    _check_running()
    check(lib.farandole_start_timeline(os.fsencode(file_path), int(mark_cycles)))


def stop_timeline() -> None:
    """Writes the rest of the trace and closes it; nothing happens where none is being written.

    Raises ValueError before init().
    """
    _check_running()
    check(lib.farandole_stop_timeline())
