# SPDX-License-Identifier: Apache-2.0
"""The settings: every variable that the runtime reads, from the core's table. For users, and for
the modules that need one."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole._library import check_count, ffi, lib, text

# What horovodrun and its kind tell the processes that they start, and what is always so here: no
# settings.
_OF_LAUNCHERS = {
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "FARANDOLE_RUN_KEY"),
    *("HOROVOD_DYNAMIC_PROCESS_SETS", "FARANDOLE_AGENT"),
}
_SECRETS = {"FARANDOLE_JOB_SECRET"}
HIDDEN = "(hidden)"  # shown instead of a secret


@dataclass(frozen=True)
class Variable:
    """An environment variable that sets up farandole: its default, meaning and value in force."""

    name: str
    alias: str  # the HOROVOD_ name of the same meaning, or ""
    default: str
    meaning: str
    value: str  # the value in force; a secret's is HIDDEN
    job_wide: bool  # rank 0's value holds for all ranks
    source: str  # of the value: "default", "tuning file", "environment" or "rank 0"

    @property
    def unit(self) -> str:
        """Of the value: "bytes", "seconds", "microseconds", or "" where it has none."""
        first = self.meaning.split()[0]
        if self.default[:-1].isdecimal() and self.default[-1] in "KMG":
            return "bytes"
        return first if first in ("seconds", "microseconds") else ""


def _nearest(name: str, variables: Sequence[Variable]) -> str:
    """The name among these that resembles `name`, or starts like it; "" if none does."""
    short = _short(name.upper())
    words = short.count("_") + 1
    known = {_short(text): v.name for v in variables for text in (v.alias, v.name) if text}
    known = {"_".join(text.split("_")[:words]): full for text, full in known.items()} | known
    found = difflib.get_close_matches(short, known, n=1, cutoff=0.75)
    return known[found[0]] if found else ""


def _short(name: str) -> str:
    return name.removeprefix("FARANDOLE_").removeprefix("HOROVOD_")


def without_effect(environment: Mapping[str, str]) -> str:
    """A warning about FARANDOLE_ and HOROVOD_ names that nothing reads; "" if there are none."""
    variables = config()
    known = {v.name for v in variables} | {v.alias for v in variables} | _OF_LAUNCHERS
    texts = []
    for name in sorted(environment):
        if name in known or not name.startswith(("FARANDOLE_", "HOROVOD_")):
            continue
        if name.startswith("FARANDOLE_TEST_"):  # of this project's own tests
            continue
        near = _nearest(name, variables)
        texts.append(f"{name} (did you mean {near}?)" if near else name)
    if not texts:
        return ""
    return (
        f"variables without effect: {', '.join(texts)}; `farandole config` lists those that have "
        "one"
    )


def setting(name: str) -> str:
    """The value in force of one variable."""
    return next(variable.value for variable in config() if variable.name == name)


def usual_file(name: str) -> Path | None:
    """The file of that name in the user's configuration directory; None for a user without a home:
    neither HOME nor a passwd entry, as in containers that run under any user id."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    folder = os.path.expanduser(folder)  # noqa: PTH111 -- Path.expanduser() raises
    return None if folder.startswith("~") else Path(folder, "farandole", name)


@contextlib.contextmanager
def home_for_mpi() -> Iterator[None]:
    """A context in which a user without a home has HOME=/, as container runtimes set it: Open MPI
    ends every process that has none."""
    missing = os.path.expanduser("~") == "~"  # noqa: PTH111
    if missing:
        os.environ["HOME"] = "/"
    try:
        yield
    finally:
        if missing:
            del os.environ["HOME"]


def config() -> list[Variable]:
    """All variables with default, meaning and the value in force. Works before init() too.

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
