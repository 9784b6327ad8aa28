# SPDX-License-Identifier: Apache-2.0
"""What farandole adds to `import torch`, by torch's entry points (2.5 and newer): the backend's
name, and the place that MPI's launcher or srun gives this process among several.

This module is outside the package and imports nothing of it: programs that only have farandole
installed don't pay for it. farandole.torch uses it too.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing import parent_process
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

__all__ = ["of_torch", "register", "start", "watch"]

_NAME = "farandole"
_PACKAGE = "farandole"
_PLACE = {"rank": "RANK", "world_size": "WORLD_SIZE"}  # in a URL, and in the environment
_watches = False
of_torch: Any = None  # c10d's handler of env://


def start() -> None:
    """torch calls it at the end of its import. A failure here must not become one of torch."""
    try:
        _start()
    except Exception as reason:
        warnings.warn(
            f"farandole failed to load in `import torch`: {reason!r}. Remedy: `import "
            "farandole.torch` in the program; TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables loading",
            RuntimeWarning,
            stacklevel=2,
        )


def _start() -> None:
    if not dist.is_available():
        return
    register()
    launchers = _launchers()
    if parent_process() is not None or os.environ.get(launchers.RANK_PROCESS):
        return  # a child of a rank, or a rank that has met the others
    found = launchers.launcher()
    if found.size > 1 and found is not launchers.TORCHRUN:
        launchers.complete()
        watch()


def _launchers() -> Any:
    """The package's module of that name, without the package, which would be imported first."""
    name = f"{_PACKAGE}.start.launchers"
    if name in sys.modules:
        return sys.modules[name]
    package = find_spec(_PACKAGE)
    assert package is not None
    assert package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "start" / "launchers.py"
    spec = spec_from_file_location("farandole_launchers", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


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
    from farandole.c10d.world import create

    return create(options)


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
    """The handler of env://, which is c10d's where its variables are set."""
    asked = _asked(url)
    wanted = ["MASTER_ADDR", "MASTER_PORT", *(_PLACE[key] for key in _PLACE if key not in asked)]
    if all(os.environ.get(name) for name in wanted):
        if _PACKAGE in sys.modules:
            importlib.import_module(f"{_PACKAGE}.start.unmet").excuse()
        yield from of_torch(url, timeout=timeout, **kwargs)
        return
    from farandole.c10d import meeting

    met = meeting.meet(asked, timeout)
    yield from (of_torch(url, timeout=timeout, **kwargs) if met is None else met)


def _meet_by_launcher(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[Any]:
    """The handler of mpi://, for any backend: ranks of mpirun, srun or another launcher meet by it,
    without an address. Raises RuntimeError where no launcher has started this process."""
    from farandole.c10d import meeting

    met = meeting.meet(_asked(url), timeout)
    if met is None:
        raise RuntimeError(
            "mpi://: no launcher has started this process. Remedy: start it by `mpirun -np 4 "
            "python train.py`, srun or `farandole run`"
        )
    yield from met


def _asked(url: str) -> dict[str, int]:
    """The place that a URL gives this rank."""
    query = parse_qs(urlparse(url).query)
    return {key: int(query[key][0]) for key in _PLACE if key in query}


def watch() -> None:
    """From now on this process says so if it trains without having met the others; once."""
    global _watches
    if not _watches:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_Stepped())
    _watches = True


class _Stepped:
    """Called after every step of every optimizer; the first one tells."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, *_: Any) -> None:
        if self._told:
            return
        self._told = True
        met = dist.is_initialized()
        if met and _PACKAGE not in sys.modules:
            return
        unmet = importlib.import_module(f"{_PACKAGE}.start.unmet")
        unmet.excuse() if met else unmet.tell_training()
