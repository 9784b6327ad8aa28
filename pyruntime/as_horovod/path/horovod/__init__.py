# SPDX-License-Identifier: Apache-2.0
"""Stands in for Horovod: the same module names, farandole's contents."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["__version__", "run"]

__version__ = "0.28.1"  # the release whose calls are here; what runs says farandole.__version__


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError: ranks are started by mpirun, not from Python."""
    raise NotImplementedError(
        "horovod.run() starts processes by itself, farandole leaves that to mpirun: put the "
        "function into a script and start `mpirun -np 4 python -m farandole.as_horovod script.py`"
    )
