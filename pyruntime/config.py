# SPDX-License-Identifier: Apache-2.0
"""Reads farandole's settings, which are the variables in the core's table and their values."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole._library import check_count, ffi, lib, text

# Variables that launchers set for their processes, and a Horovod switch that is always on here.
_OF_LAUNCHERS = {
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "FARANDOLE_RUN_KEY"),
    *("HOROVOD_DYNAMIC_PROCESS_SETS", "FARANDOLE_AGENT"),
}
_SECRETS = {"FARANDOLE_JOB_SECRET"}
HIDDEN = "(hidden)"  # shown instead of a secret


@dataclass(frozen=True)
class Variable:
    """A variable that configures farandole."""

    name: str
    alias: str  # the equivalent HOROVOD_ name, or ""
    default: str
    meaning: str
    value: str  # the value in force, or HIDDEN for a secret
    job_wide: bool  # True if rank 0's value holds for all ranks
    source: str  # where the value comes from: "default", "tuning file", "environment" or "rank 0"

    @property
    def unit(self) -> str:
        """The value's unit: "bytes", "seconds", "microseconds" or ""."""
        first = self.meaning.split()[0]
        if self.default[:-1].isdecimal() and self.default[-1] in "KMG":
            return "bytes"
        return first if first in ("seconds", "microseconds") else ""


def _nearest(name: str, variables: Sequence[Variable]) -> str:
    """Returns the variable whose name, or the start of whose name, is most similar to `name`.
    Returns "" if none is close."""
    short = _short(name.upper())
    words = short.count("_") + 1
    known = {_short(text): v.name for v in variables for text in (v.alias, v.name) if text}
    known = {"_".join(text.split("_")[:words]): full for text, full in known.items()} | known
    found = difflib.get_close_matches(short, known, n=1, cutoff=0.75)
    return known[found[0]] if found else ""


def _short(name: str) -> str:
    return name.removeprefix("FARANDOLE_").removeprefix("HOROVOD_")


def without_effect(environment: Mapping[str, str]) -> str:
    """Returns a warning about ignored FARANDOLE_ and HOROVOD_ variables, or "" if there are
    none."""
    variables = config()
    known = {v.name for v in variables} | {v.alias for v in variables} | _OF_LAUNCHERS
    texts = []
    for name in sorted(environment):
        if name in known or not name.startswith(("FARANDOLE_", "HOROVOD_")):
            continue
        if name.startswith("FARANDOLE_TEST_"):  # read by farandole's tests
            continue
        near = _nearest(name, variables)
        texts.append(f"{name} (did you mean {near}?)" if near else name)
    if not texts:
        return ""
    return (
        f"these variables have no effect: {', '.join(texts)}; `farandole config` lists the ones "
        "that farandole reads"
    )


def setting(name: str) -> str:
    """Returns the value in force of one variable."""
    return next(variable.value for variable in config() if variable.name == name)


def usual_file(name: str) -> Path | None:
    """Returns the path of a file in the user's configuration directory.

    Returns None if the user has neither HOME nor a home folder in passwd, as in some containers.
    """
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    folder = os.path.expanduser(folder)  # noqa: PTH111 -- Path.expanduser() raises
    return None if folder.startswith("~") else Path(folder, "farandole", name)


@contextlib.contextmanager
def home_for_mpi() -> Iterator[None]:
    """Context manager that sets HOME if it is unset, because Open MPI ends a process that has no
    HOME. A user without a home folder, as in containers, gets HOME=/."""
    missing = "HOME" not in os.environ
    if missing:
        home = os.path.expanduser("~")  # noqa: PTH111
        os.environ["HOME"] = "/" if home == "~" else home
    try:
        yield
    finally:
        if missing:
            del os.environ["HOME"]


def config() -> list[Variable]:
    """Returns all variables with their defaults, meanings and values. Also works before init().

    Examples:
        >>> {v.name: v.default for v in hvd.config()}["FARANDOLE_STALL_WARN"]
        '10'
    """
    count = check_count(lib.farandole_variables(ffi.NULL, 0))
    rows = ffi.new("farandole_variable[]", count)
    check_count(lib.farandole_variables(rows, count))
    return [
        Variable(
            text(row.name),
            text(row.alias),
            text(row.fallback),
            text(row.meaning),
            HIDDEN if text(row.value) and text(row.name) in _SECRETS else text(row.value),
            bool(row.job_wide),
            text(row.source),
        )
        for row in rows
    ]
