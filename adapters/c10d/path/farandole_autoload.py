# SPDX-License-Identifier: Apache-2.0
"""Entry points by which torch finds farandole: the backend's name, and meetings of its ranks.

torch 2.5 and newer call start() at the end of `import torch`, and torch 2.14 calls register() when
the backend is first asked for. Neither changes a program that does not name farandole. This module
is outside the package and imports nothing of it, so that such programs don't pay for it.
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
_PLACE = {"rank": "RANK", "world_size": "WORLD_SIZE"}  # in a URL, and in the environment
of_torch: Any = None  # c10d's handler of env://


def start() -> None:
    """torch calls it at the end of its import. A failure here must not become one of torch."""
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
    """Makes torch.distributed know the backend, its env:// farandole's ranks, and mpi://; once."""
    global of_torch
    if hasattr(dist.Backend, _NAME.upper()):
        return
    from torch.distributed.rendezvous import _rendezvous_handlers

    of_torch = _rendezvous_handlers["env"]
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 attaches a recorder of calls to groups of all backends but these, which fails for a
    # group in Python. farandole has a flight recorder of its own.
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
    """The handler of env://. It is c10d's where its variables are set, and in programs that do not
    name farandole."""
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
    """True if init_process_group is making a group of this backend. c10d does not tell handlers."""
    frame = sys._getframe()
    while frame.f_code.co_name != "init_process_group":
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return _NAME in str(frame.f_locals.get("backend")).lower()


def _meet_by_launcher(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[Any]:
    """The handler of mpi://, for any backend: ranks of mpirun, srun or another launcher meet by it,
    without an address. Raises RuntimeError where no launcher has started this process."""
    met = _met(_asked(url), timeout)
    if met is None:
        raise RuntimeError(
            "mpi://: no launcher has started this process. Remedy: start it by `mpirun -np 4 "
            "python train.py`, srun or `farandole run`"
        )
    yield from met


def _met(asked: dict[str, int], timeout: timedelta) -> Any:
    from farandole import c10d
    from farandole.c10d import meeting

    c10d.register()
    return meeting.meet(asked, timeout)


def _asked(url: str) -> dict[str, int]:
    """The place that a URL gives this rank."""
    query = parse_qs(urlparse(url).query)
    return {key: int(query[key][0]) for key in _PLACE if key in query}
