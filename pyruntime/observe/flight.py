# SPDX-License-Identifier: Apache-2.0
"""Reads flight recorders: what the ranks of a job on this host did last. For metrics(), and for
`farandole dump`, `explain` and `top` outside of the job.

Every rank writes its last 4,096 events (submit, negotiated, launched, done, error) into memory that
all ranks of the host map. It needs no flag and survives a killed rank.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole._library import check, check_count, ffi, lib

_FORMAT = "farandole-flight-2"  # csrc/watch/flight_text.cc
_LABEL = "/memfd:farandole-flight"
Page = dict[str, Any]  # one rank's recorder, as write_flight() in csrc/watch writes it


@dataclass(frozen=True)
class Job:
    """A running job of this user on this host."""

    pids: tuple[int, ...]  # that hold its recorders open, ascending; forked workers too
    path: str  # of the recorders' memory, in /proc

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor of the memory, for `pages`. Raises OSError if the job is gone."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _memories(pid: int) -> Iterator[tuple[int, str]]:
    """(inode, path) of the recorder memories that a process holds open; none without permission."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(_LABEL):
                    yield path.stat().st_ino, str(path)


def jobs_of(pids: list[int] | None = None) -> list[Job]:
    """The jobs that these processes belong to; of all processes of this user by default."""
    wanted = pids or [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found: dict[int, tuple[list[int], str]] = {}
    for pid in sorted(wanted):
        for inode, path in _memories(pid):
            found.setdefault(inode, ([], path))[0].append(pid)
    return [Job(tuple(dict.fromkeys(holders)), path) for holders, path in found.values()]


def page(fd: int, local_rank: int, events: int) -> Page:
    """One rank's recorder with its last `events` events; `fd` -1: of the own job."""
    capacity = 1 << 14
    while True:
        text = ffi.new("char[]", capacity)
        length = check_count(lib.farandole_flight(fd, local_rank, events, text, capacity))
        if length <= capacity:
            found: Page = json.loads(ffi.buffer(text, length)[:].decode(errors="replace"))
            return found
        capacity = length + (1 << 14)  # room for events written meanwhile


def pages(fd: int, events: int) -> list[Page]:
    """All ranks' recorders, by local rank."""
    return [page(fd, local, events) for local in range(check_count(lib.farandole_flight_ranks(fd)))]


def own_page(events: int = 0) -> Page:
    """This rank's recorder. Raises ShutdownError before init()."""
    where = ffi.new("farandole_topology*")
    check(lib.farandole_where(where))
    return page(-1, where.local_rank, events)


def dump(job: Job, folder: Path, reason: str) -> None:
    """Writes FOLDER/flight-rank-N.json for every rank of a running job on this host."""
    with job.open() as fd:
        check(lib.farandole_dump(fd, os.fsencode(folder), reason.encode()))


def read_dumps(folder: Path) -> list[Page]:
    """The dumps in a folder, by rank.

    Raises FileNotFoundError if there is none, ValueError on a file that is cut off or foreign.
    """
    files = sorted(folder.glob("flight-rank-*.json"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no flight-rank-*.json; dumps are written there on errors and stalls "
            "if FARANDOLE_FLIGHT_DIR names it, or by `farandole dump PID --into`"
        )
    dumps: list[Page] = []
    for file in files:
        try:
            found = json.loads(file.read_text(errors="replace"))
        except json.JSONDecodeError as reason:
            raise ValueError(f"{file} is not a complete dump: {reason}") from reason
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"{file} is not a dump of this version of farandole")
        dumps.append(found)
    return sorted(dumps, key=lambda found: int(found["rank"]))


def worlds_of(folder: Path) -> list[Path]:
    """The folders with dumps of an elastic job's worlds, in their order; [] if there is none."""
    later = [path for path in folder.glob("world-*") if path.name[6:].isdecimal()]
    return [folder] * any(folder.glob("flight-rank-*.json")) + sorted(
        later, key=lambda path: int(path.name[6:])
    )


def began(dumps: list[Page]) -> int:
    """When the world of these dumps began, in nanoseconds of the epoch."""
    return max(int(page["began_ns"] + page["epoch_minus_monotonic_ns"]) for page in dumps)


def of_last_job(dumps: list[Page]) -> list[Page]:
    """Leaves out dumps of earlier jobs, written before the last job began."""
    last = began(dumps)
    return [p for p in dumps if p["now_ns"] + p["epoch_minus_monotonic_ns"] >= last]
