# SPDX-License-Identifier: Apache-2.0
"""Reads the flight recorders of a job on this host and matches the calls of the job's ranks.

Used by metrics(), `farandole dump` and `farandole explain`. The two commands run outside the job.

Every rank always records its last 4,096 events (submit, negotiated, launched, done, error) in
memory that all ranks of the host map, so a killed rank's events are not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole._library import check, check_count, ffi, lib
from farandole.errors import printable
from farandole.trust import is_own_user, read_text

_FORMAT = "farandole-flight-2"  # the same as in csrc/watch/flight_text.cc
_LABEL = "/memfd:farandole-flight"
_MOST_BYTES = 16 << 20  # limit for a dump; 4,096 events and 1,024 calls need 2 MB
_MOST_MEMBERS = 1 << 20  # most JSON items in a dump; parsing needs at least 60 bytes for each
_MOST_RANKS = 1 << 14  # limit for the number of ranks that a dump claims
_TIMES = ("now_ns", "began_ns", "epoch_minus_monotonic_ns")
_LINES = frozenset({"text", "story", "findings", "reason"})  # JSON fields that may span lines
Page = dict[str, Any]  # one rank's recorder, in the form that write_flight() in csrc/watch writes


@dataclass(frozen=True)
class RunningJob:
    """A job that is running on this host and belongs to this user."""

    pids: tuple[int, ...]  # processes of the job's ranks, in ascending order
    path: str  # path of the recorders' memory under /proc

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """Context manager that opens the recorders' memory for pages(). Raises OSError if the job
        has ended."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _memories(pid: int, own: bool) -> Iterator[tuple[tuple[int, int], str]]:
    """Yields a pair ((device, inode), path) for each recorder that a process holds open. Yields
    none if this user may not inspect the process.

    If `own`, yields only recorders that this user owns. A process cannot fake the owner.
    """
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(_LABEL):
                    found = path.stat()
                    if not own or is_own_user(found.st_uid):
                        yield (found.st_dev, found.st_ino), str(path)


def jobs_of(pids: list[int] | None = None) -> list[RunningJob]:
    """Returns the jobs to which these processes belong, by default all jobs of this user."""
    found: dict[tuple[int, int], tuple[list[int], str]] = {}
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        for memory, path in _memories(pid, own=not pids):
            found.setdefault(memory, ([], path))[0].append(pid)
    jobs = [RunningJob(tuple(dict.fromkeys(holders)), path) for holders, path in found.values()]
    return [job for job in jobs if not pids or set(pids) & set(job.pids)]


def why_no_job(pids: list[int]) -> str:
    """Returns a text that explains why jobs_of(pids) found no job."""
    found = [_why_not(pid) for pid in pids]
    return "; ".join(found) or (
        "no farandole job of this user is running on this host; a job is found after init()"
    )


def _why_not(pid: int) -> str:
    process = Path(f"/proc/{pid}")
    try:
        name = printable((process / "comm").read_bytes().decode(errors="replace").strip())
        owner = process.stat().st_uid
    except OSError:
        return f"there is no process {pid} on this host"
    if not is_own_user(owner) and not os.access(process / "fd", os.R_OK):
        return f"process {pid} ({name}) belongs to user {owner}: run this as that user"
    return f"process {pid} ({name}) is in no farandole job, or has not called init() yet"


def page(fd: int, local_rank: int, events: int) -> Page:
    """Returns a rank's recorder with its last `events` events. `fd` is -1 for this process's own
    job."""
    capacity = 1 << 14
    while True:
        text = ffi.new("char[]", capacity)
        length = check_count(lib.farandole_flight(fd, local_rank, events, text, capacity))
        if length <= capacity:
            return _shown(json.loads(ffi.buffer(text, length)[:].decode(errors="replace")))
        capacity = length + (1 << 14)  # with room for events recorded in the meantime


def _shown(found: Page) -> Page:
    """Returns the page with all strings made safe to print on a terminal."""

    def shown(value: Any, lines: bool = False) -> Any:
        if isinstance(value, str):
            return printable(value, lines)
        if isinstance(value, dict):
            return {printable(k): shown(v, k in _LINES) for k, v in value.items()}
        return [shown(v) for v in value] if isinstance(value, list) else value

    page: Page = shown(found)
    return page


def failure_of(page: Page) -> str:
    """Returns the first line of a rank's failure, or "" if the rank has not failed."""
    lines = page["failure"]["text"].splitlines() if "failure" in page else []
    return lines[0] if lines else ""


def pages(fd: int, events: int) -> list[Page]:
    """Returns the recorders of all ranks on this host, in order of local rank."""
    return [page(fd, local, events) for local in range(check_count(lib.farandole_flight_ranks(fd)))]


def own_page(events: int = 0) -> Page:
    """Returns this rank's recorder. Raises ShutdownError before init()."""
    where = ffi.new("farandole_topology*")
    check(lib.farandole_where(where))
    return page(-1, where.local_rank, events)


def dump(job: RunningJob, folder: Path, reason: str) -> None:
    """Writes FOLDER/flight-rank-N.json for each rank of a running job on this host."""
    with job.open() as fd:
        check(lib.farandole_dump(fd, os.fsencode(folder), reason.encode()))


def read_dumps(folder: Path) -> list[Page]:
    """Reads the dumps in a folder, in rank order.

    Raises FileNotFoundError if there are none. Raises ValueError if a file is truncated, not a
    dump, larger than 16 MB or not a regular file, or if the files belong to several users.
    """
    files = sorted(folder.glob("flight-rank-*.json"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no flight-rank-*.json; farandole writes dumps on errors and stalls to "
            "the folder that FARANDOLE_FLIGHT_DIR names, and on `farandole dump --into FOLDER`"
        )
    owners = set[int]()
    dumps = [_read(file, owners) for file in files]
    if len(owners) > 1:  # another user's dump could misrepresent this user's job
        raise ValueError(
            f"{folder} holds dumps of users {', '.join(map(str, sorted(owners)))}; remedy: move "
            "one user's to another folder"
        )
    return sorted(dumps, key=lambda found: int(found["rank"]))


def _read(file: Path, owners: set[int]) -> Page:
    """Reads a dump and makes its strings safe to print. Raises ValueError if it is not valid."""
    shown = printable(str(file))
    try:
        text = read_text(file, _MOST_BYTES, owners)
        if sum(map(text.count, ",[{")) > _MOST_MEMBERS:
            raise ValueError(f"{shown} is not a dump: it has too many members")
        found = _shown(json.loads(text))
    except (json.JSONDecodeError, RecursionError) as reason:
        raise ValueError(f"{shown} is not a complete dump: {reason}") from reason
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"{shown} is not a dump of this version of farandole")
    rank, size = found.get("rank"), found.get("size")
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size <= _MOST_RANKS):
        raise ValueError(f"{shown} is not a dump: it claims rank {rank!r:.40} of {size!r:.40}")
    if not all(isinstance(found.get(name), int) for name in _TIMES):
        raise ValueError(f"{shown} is not a dump: it has no times")
    return found


def worlds_of(folder: Path) -> list[Path]:
    """Returns the folders that hold the dumps of an elastic job's worlds, in order of the worlds.
    Returns [] if there are none."""
    later = [path for path in folder.glob("world-*") if path.name[6:].isdecimal()]
    return [folder] * any(folder.glob("flight-rank-*.json")) + sorted(
        later, key=lambda path: int(path.name[6:])
    )


def began(dumps: list[Page]) -> int:
    """Returns when the world of these dumps started, in nanoseconds since the epoch."""
    return max(int(page["began_ns"] + page["epoch_minus_monotonic_ns"]) for page in dumps)


def of_last_job(dumps: list[Page]) -> list[Page]:
    """Returns the dumps of the last job. Omits dumps that were written before that job started."""
    last = began(dumps)
    return [p for p in dumps if p["now_ns"] + p["epoch_minus_monotonic_ns"] >= last]


# ---- calls, matched across ranks


@dataclass
class RecordedCall:
    """A call on one tensor, as recorded by one rank. Times are in ns of CLOCK_MONOTONIC. 0 means
    not recorded."""

    rank: int
    name: str  # "" if the call is unnamed
    op: str
    process_set: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    order: int = 0  # the call's number among the process set's unnamed calls
    peer: int = -1  # the other rank of a message, or -1 for any rank
    tag: int = 0
    site: str = ""  # file:line in the user's program
    # Place in the coordinator's log, which is equal on all ranks. Numbers from 1 << 62 on are
    # instead places among the set's calls in a cell. 0 means not negotiated.
    position: int = 0
    bucket: int = 0
    lane: int = 0  # the bucket's process set, or a number for the pair of ranks of a message
    submitted: int = 0
    negotiated: int = 0
    launched: int = 0
    done: int = 0
    error: int = 0  # error code, or 0

    @property
    def is_message(self) -> bool:
        """True for one end of a message. Messages have different numbers on different ranks."""
        return self.op in ("send", "receive")

    @property
    def label(self) -> str:
        """The call's name, or its number among unnamed calls."""
        return self.name or f"unnamed call {self.order}"

    @property
    def state(self) -> str:
        """The call's state: submitted, negotiated, moving, done or failed."""
        if self.error:
            return "failed"
        if self.done:
            return "done"
        if self.launched:
            return "moving"
        return "negotiated" if self.negotiated else "submitted"

    def __str__(self) -> str:
        if self.is_message:
            return message_text(self.op, self.name, self.peer, self.tag)
        what = f"'{self.name}'" if self.name else self.label
        return f"{what} ({self.op}{self.site and f' at {self.site}'})"


def message_text(op: str, name: str, peer: int, tag: int) -> str:
    """Returns a text such as "send 'x' to rank 1 with tag 7" for one end of a message."""
    what = f"{op} '{name}'" if name else op
    way = "to" if op == "send" else "from"
    return f"{what} {way} {'any rank' if peer < 0 else f'rank {peer}'} with tag {tag}"


def calls_of(page: Page) -> list[RecordedCall]:
    """Returns the open and recent calls of one rank, in order of submission.

    Omits calls that have ended and were submitted before the oldest recorded event.
    """
    calls: dict[int, RecordedCall] = {}
    launched: dict[tuple[int, int], int] = {}

    def apply(kind: str, event: dict[str, Any]) -> RecordedCall:
        call = calls.get(event["call"])
        if call is None:
            name, op = event["name"], event["op"]
            call = calls[event["call"]] = RecordedCall(page["rank"], name, op, event["set"])
        _apply(call, kind, event)
        return call

    for known in page["open"]:
        call = apply("submit", known)
        if known["position"]:
            call.negotiated, call.position = known["negotiated"], known["position"]
            call.bucket, call.lane = known["agreed_bucket"], known["lane"]
    for event in page["events"]:
        if event["kind"] == "launched":
            launched[event["set"], event["bucket"]] = event["t"]
        if "call" in event:
            apply(event["kind"], event)
    for call in calls.values():
        if call.bucket:
            call.launched = launched.get((call.lane, call.bucket), 0)
    complete = (call for call in calls.values() if call.submitted)
    return sorted(complete, key=lambda call: call.submitted)


def _apply(call: RecordedCall, kind: str, event: dict[str, Any]) -> None:
    call.dtype, call.bytes = event["dtype"], event["bytes"]
    if kind == "submit":
        call.submitted, call.order = event["t"], event["seq"]
        call.shape = tuple(event["shape"])
        call.site = event.get("site", "")
        if call.is_message:
            call.peer, call.tag = event.get("peer", -1), event.get("tag", 0)
    elif kind == "negotiated":
        call.negotiated, call.position, call.bucket = event["t"], event["seq"], event["bucket"]
        call.lane = event["set"]
    elif kind == "done":
        call.done = event["t"]
    elif kind == "error":
        call.done, call.error = event["t"], event["value"]


@dataclass
class MatchedCall:
    """One call, as recorded by all ranks whose recorders were read."""

    calls: dict[int, RecordedCall] = field(default_factory=dict)  # by rank

    @property
    def first(self) -> RecordedCall:
        """The record of the rank that submitted the call first."""
        return min(self.calls.values(), key=lambda call: call.submitted)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The fields that are equal on all ranks and known when the call is submitted."""
        first = self.first
        return first.process_set, first.name, first.order, first.op

    @property
    def negotiated(self) -> bool:
        """True once every member of the set has submitted the call."""
        return any(call.position for call in self.calls.values())


def matched_calls(pages: Sequence[Page]) -> list[MatchedCall]:
    """Matches calls across ranks. Returns negotiated calls in log order, then waiting calls."""
    found: dict[tuple[Any, ...], MatchedCall] = {}
    for page in pages:
        for call in calls_of(page):
            # A name can be reused after a failure, so failed calls with the same name match in
            # order.
            key: tuple[Any, ...] = (call.position, call.process_set, call.name, call.order)
            if call.is_message:
                key = (call.rank, call.submitted)
            while call.position == 0 and call.rank in found.setdefault(key, MatchedCall()).calls:
                key = (*key, "again")
            found.setdefault(key, MatchedCall()).calls[call.rank] = call
    _join_late_readers(list(found.values()), {page["rank"]: page for page in pages})
    return sorted((shared for shared in found.values() if shared.calls), key=_order)


def _join_late_readers(shared: Sequence[MatchedCall], pages: Mapping[int, Page]) -> None:
    """Merges a call that waits on one rank into the other ranks' call if those ranks have recorded
    the agreement on it."""

    def time(rank: int, ns: int) -> int:
        return int(ns + pages[rank]["epoch_minus_monotonic_ns"])

    agreed: dict[tuple[Any, ...], MatchedCall] = {}  # the last call with each identity
    for one in sorted((one for one in shared if one.negotiated), key=_order):
        agreed[one.identity] = one
    for one in shared:
        other = agreed.get(one.identity)
        if one.negotiated or other is None or one.first.is_message:
            continue
        began = min(time(rank, call.negotiated) for rank, call in other.calls.items())
        for rank, call in list(one.calls.items()):
            if rank not in other.calls and time(rank, call.submitted) <= began:
                other.calls[rank] = one.calls.pop(rank)


def _order(shared: MatchedCall) -> tuple[bool, int, int]:
    position = max(call.position for call in shared.calls.values())
    return not position, position, shared.first.submitted


def reaches_back_to(page: Page, ns: int) -> bool:
    """True if a rank has kept all events since `ns`, a time on that rank's monotonic clock."""
    kept = page["events"]
    return len(kept) == page["recorded"] or bool(kept and kept[0]["t"] <= ns)


def members_of(pages: Sequence[Page], process_set: int) -> Sequence[int]:
    """Returns a process set's ranks, ascending, or the world's if no rank has recorded the set."""
    for page in pages:
        if text := page["sets"].get(str(process_set)):
            return [int(rank) for rank in text.split(",")]
    return range(pages[0]["size"])
