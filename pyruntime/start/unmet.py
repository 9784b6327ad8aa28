# SPDX-License-Identifier: Apache-2.0
"""Warns if a launcher has started several processes and one of them trains without init().

Otherwise, N processes would silently train N models. The import of farandole, init() and the
adapters use this.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

from farandole.start import ancestry, launchers

_REMEDY = (
    "Remedy: call init() of farandole, or init_process_group(), before the model is made; a script "
    "that reads RANK finds it under `farandole run`, or after `import farandole.torch`; "
    f"{launchers.ALONE}"
)
_open = False  # True while a warning may become due


def watch() -> None:
    """Starts to watch if a launcher has started several processes, including this one."""
    global _open
    found = launchers.launcher()
    alone = os.environ.get("FARANDOLE_RENDEZVOUS") == "none"
    if found.size <= 1 or found.rank < 0 or alone or is_child():
        return
    _open = True


def is_open() -> bool:
    """Returns True if this is one of several processes and, as far as is known, has met none."""
    return _open


def is_child() -> bool:
    """Returns True if a process of the job, rather than the launcher, has started this one."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)
    return parent() is not None or ancestry.is_of_rank()


def mark_met() -> None:
    """Notes that no warning is due, because this process meets the others or need not meet them."""
    global _open
    _open = False


def warn_if_unmet() -> None:
    """Prints the warning once. Call this after an optimizer step without init()."""
    if _open and not _met_by_mpi():
        found = launchers.launcher()
        text = (
            f"farandole: this process, rank {found.rank} of the {found.size} of {found}, has made "
            "an optimizer step without having met the others: each trains its own model. "
        )
        print(text + _REMEDY, file=sys.stderr, flush=True)
    mark_met()


def _met_by_mpi() -> bool:
    """Returns True if the program itself has initialised MPI, through any package."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    answer = ctypes.c_int()
    for path in set(re.findall(r"/\S*/lib(?:mpi|mpich)(?:_cray)?\.so[.\d]*$", maps, re.MULTILINE)):
        ctypes.CDLL(path).MPI_Initialized(ctypes.byref(answer))
        if answer.value:
            return True
    return False
