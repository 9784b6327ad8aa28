# SPDX-License-Identifier: Apache-2.0
"""Replaces the package `horovod`. It has Horovod's module names and farandole's calls."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import farandole
from farandole.as_horovod.modules import HorovodFinder
from farandole.errors import warn

__all__ = ["__version__", "run"]

__version__ = "0.28.1"  # the Horovod release with this API

if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, HorovodFinder())

# Options that are accepted and ignored, because farandole always behaves as if they were given.
_GRANTED = {"use_mpi", "use_gloo", "disable_cache"}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    mpi_args: str | None = None,
    executable: str | None = None,
    verbose: Any = None,
    **others: Any,
) -> list[Any]:
    """Calls farandole.run(). Accepts Horovod's argument names, including older ones such as `np`.

    The number of ranks is fixed. It is `num_proc` if given, otherwise the upper limit if given, and
    otherwise the lower limit. Raises ValueError for numbers that contradict each other and for
    arguments that only other launchers support.
    """
    refused = [name for name, value in others.items() if value and name not in _GRANTED]
    if refused:
        raise ValueError(f"horovod.run({refused[0]}=...) is not supported: see `farandole run`")
    return farandole.run(
        func,
        args,
        kwargs,
        np=_ranks(
            _one("num_proc", num_proc, "np", np),
            _one("min_num_proc", min_num_proc, "min_np", min_np),
            _one("max_num_proc", max_num_proc, "max_np", max_np),
        ),
        hosts=hosts,
        hostfile=hostfile,
        launcher_args=shlex.split(mpi_args or ""),
        start_timeout=start_timeout or 120.0,
        executable=executable,
        verbose=bool(verbose),
    )


def _one(name: str, value: int | None, alias: str, other: int | None) -> int | None:
    """Returns an argument that may have been passed by its older name. Raises ValueError if both
    names are used with different values."""
    if value is not None and other is not None and value != other:
        raise ValueError(f"horovod.run({name}={value}, {alias}={other}): pass only one of them")
    return other if value is None else value


def _ranks(number: int | None, least: int | None, most: int | None) -> int:
    """Returns the number of ranks to start. Raises ValueError if it is outside the limits."""
    if number is None:
        number = next((limit for limit in (most, least) if limit is not None), 1)
    if number < (least or 1) or number > (most or number):
        raise ValueError(
            f"horovod.run(): {number} ranks are not between {least or 1} and {most or number}"
        )
    if number != (least or number) or number != (most or number):
        warn(
            f"horovod.run() starts {number} ranks and keeps that number; for an elastic job use "
            "`farandole run --min-np N --max-np M`",
            UserWarning,
        )
    return number
