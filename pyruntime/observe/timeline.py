# SPDX-License-Identifier: Apache-2.0
"""Public calls that start and stop a trace of this rank, for Chrome or Perfetto. A thread of the
core writes the file."""

from __future__ import annotations

import os

from farandole._library import check, lib
from farandole.topology import rank


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts a trace. Rank 0 writes `file_path`, and rank N writes NAME.rankN.SUFFIX next to it.

    This call is not collective and does not affect other calls. If `mark_cycles`, the trace shows
    each batch of decisions that this rank reads. Raises ValueError before init() or if a trace is
    already being written, and LibraryError if the file can't be created.

    Examples:
        >>> hvd.start_timeline("run.json")
        >>> hvd.stop_timeline()  # then: https://ui.perfetto.dev
    """
    rank()  # raises before init()
    check(lib.farandole_start_timeline(os.fsencode(file_path), int(mark_cycles)))


def stop_timeline() -> None:
    """Completes the trace and closes its file. Does nothing if no trace is being written.

    Raises ValueError before init().

    Examples:
        >>> hvd.stop_timeline()
    """
    rank()  # raises before init()
    check(lib.farandole_stop_timeline())
