# SPDX-License-Identifier: Apache-2.0
"""Entry points by which torch finds the backend `farandole` and its rendezvous handlers.

torch 2.5 and newer call start() at the end of `import torch`. torch 2.14 calls register() when a
program first uses the backend. Neither call affects a program that does not name farandole, because
this module lies outside the package and does not import it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

__all__ = ["of_torch", "register", "start"]

_NAME = "farandole"
# The environment variable that corresponds to each URL parameter.
_PLACE = {"rank": "RANK", "world_size": "WORLD_SIZE"}
of_torch: Any = None  # c10d's handler of env://


def start() -> None:
    """torch calls this at the end of its import. A failure only warns, and the import succeeds."""
    try:
        if dist.is_available():
            register()
    except Exception as reason:
        warnings.warn(
            f"farandole failed to load in `import torch`: {reason!r}. Remedy: `import "
            "farandole.torch` in the program; TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables loading",
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Registers the backend and the handlers of env:// and mpi://. Later calls do nothing."""
    global of_torch
    if hasattr(dist.Backend, _NAME.upper()):
        return
    from torch.distributed.rendezvous import _rendezvous_handlers

    of_torch = _rendezvous_handlers["env"]
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 attaches its flight recorder to groups of all backends not listed here, which fails
    # for a group written in Python. farandole has its own recorder.
    recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(_NAME)
    _rendezvous_handlers["env"] = _meet
    _rendezvous_handlers["mpi"] = _meet_by_launcher


def _create(options: Any, _: Any) -> Any:
    from farandole import c10d
    from farandole.c10d.world import create

    c10d.register()
    return create(options)


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
    """Handler of env://.

    Calls c10d's handler if its variables are set, or if the program does not name farandole.
    """
    asked = _asked(url)
    wanted = ["MASTER_ADDR", "MASTER_PORT", *(_PLACE[key] for key in _PLACE if key not in asked)]
    met = None
    if all(os.environ.get(name) for name in wanted):
        if _NAME in sys.modules:
            from farandole.start import unmet

            unmet.mark_met()
    elif _NAME in sys.modules or _is_backend():
        met = _met(asked, timeout)
    yield from (of_torch(url, timeout=timeout, **kwargs) if met is None else met)


def _is_backend() -> bool:
    """Returns True if init_process_group() is creating a group of this backend.

    c10d does not pass the backend to handlers, so this function reads it from the caller's frame.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "init_process_group":
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return _NAME in str(frame.f_locals.get("backend")).lower()


def _meet_by_launcher(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[Any]:
    """Handler of mpi://, for any backend. Ranks that mpirun or srun has started need no address.

    Raises RuntimeError if no launcher has started this process.
    """
    met = _met(_asked(url), timeout)
    if met is None:
        raise RuntimeError(
            "mpi://: no launcher has started this process. Remedy: start it with `mpirun -np 4 "
            "python train.py`, srun or `farandole run`"
        )
    yield from met


def _met(asked: dict[str, int], timeout: timedelta) -> Any:
    from farandole import c10d
    from farandole.c10d import meeting

    c10d.register()
    return meeting.meet(asked, timeout)


def _asked(url: str) -> dict[str, int]:
    """Returns the rank and world size that a URL contains."""
    query = parse_qs(urlparse(url).query)
    return {key: int(query[key][0]) for key in _PLACE if key in query}
