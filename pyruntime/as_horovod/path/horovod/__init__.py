# SPDX-License-Identifier: Apache-2.0
"""Replaces Horovod: the same module names, farandole's contents (farandole.as_horovod.modules)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import farandole
from farandole.as_horovod.modules import Modules

__all__ = ["__version__", "run"]

__version__ = "0.28.1"  # the release whose calls are here; farandole.__version__ is ours

if not any(isinstance(finder, Modules) for finder in sys.meta_path):
    sys.meta_path.insert(0, Modules())

# Options without effect: farandole always behaves so.
_GRANTED = {"use_mpi", "use_gloo", "disable_cache"}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    mpi_args: str | None = None,
    executable: str | None = None,
    verbose: Any = None,
    **others: Any,
) -> list[Any]:
    """farandole.run() with Horovod's argument names. ValueError for other launchers' ones."""
    refused = [name for name, value in others.items() if value and name not in _GRANTED]
    if refused:
        raise ValueError(f"horovod.run({refused[0]}=...) has no meaning here: see `farandole run`")
    return farandole.run(
        func,
        args,
        kwargs,
        np=num_proc,
        hosts=hosts,
        hostfile=hostfile,
        launcher_args=shlex.split(mpi_args or ""),
        start_timeout=start_timeout or 120.0,
        executable=executable,
        verbose=bool(verbose),
    )
