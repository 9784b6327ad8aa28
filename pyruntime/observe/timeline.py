# SPDX-License-Identifier: Apache-2.0
"""A trace of this rank for Chrome or Perfetto, started and stopped at run time. Public calls; a
thread of the core writes it."""

from __future__ import annotations

import os

from farandole._library import check, lib
from farandole.topology import rank


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts to write a trace: rank 0 to `file_path`, rank N to NAME.rankN.SUFFIX in its folder.

    Not collective; it does not affect the calls. `mark_cycles` marks each batch of
    decisions that the rank reads. Raises ValueError before init() and if a trace is already
    written, LibraryError if the file can't be made.

    Examples:
        >>> hvd.start_timeline("run.json")
        >>> hvd.stop_timeline()  # then: https://ui.perfetto.dev
    """
    rank()  # raises before init()
    check(lib.farandole_start_timeline(os.fsencode(file_path), int(mark_cycles)))


def stop_timeline() -> None:
    """Writes the rest of the trace and closes it. Does nothing if none is being written.

    Raises ValueError before init().

    Examples:
        >>> hvd.stop_timeline()
    """
    rank()  # raises before init()
    check(lib.farandole_stop_timeline())
