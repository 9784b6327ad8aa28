# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a ParameterServer: its rows, all workers' clocks, and the thread that serves
other ranks. For worker.py.

Messages to a ShardServer, sent as (kind, number) with tag REQUEST:

| kind | sender | meaning of number | receiver's action |
|---|---|---|---|
| PUSH | worker | number of rows that the preceding BODY lists | updates the rows |
| PULL | worker | number of rows that the preceding BODY lists | sends a REPLY |
| TICK | worker | the worker's new clock | stores the clock |
| DONE | worker | ignored | notes that the worker has left |
| HEARTBEAT | idle server | ignored | none; its arrival keeps the receive from counting as a stall |
| FAILED | server | first rank whose part is lost | makes this rank's later calls fail |
| LOST | server | first rank whose part is lost | the actions for FAILED and DONE |
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from farandole.calls.handles import Handle, done_within
from farandole.calls.requests import on_leave
from farandole.config import setting
from farandole.errors import FarandoleError, PeerError, ShutdownError, StallError, warn
from farandole.members import ProcessSet
from farandole.messages import recv, recv_async, send, send_async

Array = np.ndarray[Any, np.dtype[Any]]
Update = Callable[[Array, Array], Array]
PUSH, PULL, TICK, DONE, LOST, HEARTBEAT, FAILED = range(7)  # kinds of messages
NAME = "parameter server"  # name of a server's calls and messages in errors and traces
_GOODBYE_SECONDS = 1.0
_LEFT = float("inf")  # clock of a worker that has left
REQUEST, BODY, REPLY, TAGS = range(4)  # counted from a server's first tag


def heartbeat_seconds() -> float:
    """Returns the number of idle seconds after which a server sends heartbeats. Without them, a
    long receive would count as a stall."""
    limits = [float(setting(f"FARANDOLE_STALL_{name}")) for name in ("WARN", "ABORT")]
    return min((limit for limit in limits if limit > 0), default=30.0) / 3


def check_held(given: Array, dtype: str, what: str) -> None:
    """Raises ValueError if values are not numbers, or do not fit the table's integer dtype."""
    table = np.dtype(dtype)
    held = given.dtype.kind in "biuf"
    if held and table.kind != "f":
        with np.errstate(invalid="ignore"):  # NaN
            held = bool((given.astype(table) == given).all())
    if not held:
        raise ValueError(f"{what} are {given.dtype}, which a table of {table} can't hold")


class TableSettings(NamedTuple):
    """Settings that are equal on all ranks of a server."""

    shape: tuple[int, ...]
    dtype: str
    initial: float | str
    update: str
    staleness: int | None


class Shard:
    """One rank's rows, and the clocks of all workers. For any thread.

    Row r of the table is at index r // n of rank r % n, where n is the number of ranks.
    """

    def __init__(self, values: Array, update: Update, ranks: int, staleness: int | None) -> None:
        """`values` holds the initial values of the rows, and becomes the table itself."""
        self._values = values
        self._update = update
        self._staleness = staleness
        self.changed = threading.Condition()  # its lock is reentrant
        self.clocks: list[float] = [0] * ranks
        self.failure: Exception | None = None
        self.lost: int | None = None  # first rank known to have lost its part
        self.alone = False  # True: no more messages come from other ranks

    def check_places(self, places: Array) -> None:
        """Raises PeerError for indices that no rank would send. Such indices were altered in
        transit, where messages are not protected."""
        if ((places < 0) | (places >= len(self._values))).any():
            raise PeerError(
                f"{NAME}: a request for rows was altered on its way; remedy: check the network "
                "between the hosts, and who can write to it"
            )

    def push(self, places: Array, values: Array) -> None:
        """Updates rows, which must differ. If the user's function raises, the shard fails."""
        with self.changed:
            try:
                new = np.asarray(self._update(self._values[places], values))
                if new.shape != values.shape:
                    raise ValueError(
                        f"update returned an array of shape {new.shape} for rows of "
                        f"{values.shape}: it must return the new rows"
                    )
                check_held(new, self._values.dtype.name, "rows that update returned")
                self._values[places] = new
            except Exception as reason:
                self.fail(reason)

    def pull(self, places: Array) -> Array:
        """Returns copies of these rows."""
        with self.changed:
            return self._values[places]

    def tick(self, rank: int, clock: float) -> None:
        """Stores a worker's clock."""
        with self.changed:
            self.clocks[rank] = clock
            self.changed.notify_all()

    def wait_fresh(self, clock: float) -> None:
        """Blocks until a worker at this clock may read. Raises StallError, or the error with which
        the shard has failed."""
        if self._staleness is not None:
            least = clock - self._staleness
            over = lambda: self.failure is not None or min(self.clocks) >= least  # noqa: E731
            self._wait(over, f"pull() at clock {clock:g}")
        self.check()

    def wait_all_left(self) -> None:
        """Blocks until every worker has left. Raises StallError."""
        self._wait(lambda: self.alone or min(self.clocks) == _LEFT, "leaving a ParameterServer")

    def _wait(self, over: Callable[[], bool], what: str) -> None:
        """Waits within the limits of FARANDOLE_STALL_WARN and FARANDOLE_STALL_ABORT."""
        begun = 0.0
        with self.changed:
            if over():
                return
            limits = [(float(setting(f"FARANDOLE_STALL_{end}")), end) for end in ("WARN", "ABORT")]
            for limit, end in sorted(one for one in limits if one[0] > 0):
                if self.changed.wait_for(over, limit - begun):
                    return
                begun = limit
                slowest = int(np.argmin(self.clocks))
                text = (
                    f"{what} has waited {limit:g} s for rank {slowest}, whose clock is "
                    f"{self.clocks[slowest]:g}: each rank must call clock() after its pushes, "
                    "and leave the ParameterServer at the end"
                )
                if end == "ABORT":
                    raise StallError(text)
                warn(text, RuntimeWarning)
            self.changed.wait_for(over)

    def fail(self, reason: Exception, alone: bool = False) -> None:
        """Stores the first error, which later calls raise. `alone`: no more messages will come."""
        with self.changed:
            self.failure = self.failure or reason
            self.alone = self.alone or alone
            self.changed.notify_all()

    def check(self) -> None:
        """If the shard has failed, raises the stored error."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)


@on_leave
def abandon_all() -> None:
    """Tells the other ranks that this rank leaves the job, and that its rows are lost."""
    for server in list(_servers):
        server.lose(ShutdownError(f"{NAME}: this rank has left the job"))


class ShardServer(threading.Thread):
    """Thread that serves the other ranks' requests to a shard in turn, until all workers have left.

    The thread never waits for a worker's Python: before a request, a worker posts the request's
    body and the receive of the reply. Idle servers send each other heartbeats, so that the receive
    that every server has under way does not count as a stall. A rank that leaves early sends LOST.
    """

    def __init__(
        self, shard: Shard, settings: TableSettings, tag: int, process_set: ProcessSet
    ) -> None:
        """`tag`: the first of this server's TAGS tags."""
        super().__init__(name="farandole.ParameterServer", daemon=True)
        self._shard = shard
        self._width = settings.shape[1:]
        self._dtype = np.dtype(settings.dtype)
        self._tag = tag
        self._set = process_set
        self._rank = process_set.rank() or 0
        self._open = set(range(process_set.size() or 1)) - {self._rank}  # ranks that have not left
        self._heartbeats: dict[int, Handle[None]] = {}  # the last HEARTBEAT to each rank
        self._idle = heartbeat_seconds()
        self._failure_reported = False
        _servers.add(self)

    def run(self) -> None:
        """Serves until all workers have left or something fails."""
        try:
            while self._open and not self._shard.alone:
                self._serve()
            self._stay()
        except Exception as reason:  # job ended, a rank died, or memory is short
            self.lose(reason)
        except BaseException as reason:
            self.lose(FarandoleError(f"{NAME}: update raised {reason!r}"))

    def _serve(self) -> None:
        header = np.empty(2, np.int64)
        handle = recv_async(header, tag=self._tag + REQUEST, name=NAME, process_set=self._set)
        while not done_within(handle, self._idle):
            self._send_heartbeats()
        source = handle.wait()
        kind, number = header.tolist()
        if kind == PUSH:
            self._shard.push(*self._body(source, number, values=True))
            self.report_failure()
        elif kind == PULL:
            self._reply(source, self._body(source, number, values=False)[0])
        elif kind == TICK:
            self._shard.tick(source, number)
        elif kind == FAILED:
            self._receive_lost(number)
        elif kind in (DONE, LOST):
            if kind == LOST:
                self._receive_lost(number)
            self._shard.tick(source, _LEFT)
            self._open.discard(source)

    def _receive_lost(self, rank: int) -> None:
        """Makes this shard's calls fail, because `rank` no longer serves its part of the table."""
        with self._shard.changed:
            self._shard.lost = rank if self._shard.lost is None else self._shard.lost
            self._shard.fail(
                PeerError(
                    f"rank {rank} no longer serves its part of a ParameterServer: calls on that "
                    "rank raise the reason, or it left the job before it left the ParameterServer "
                    "by `with` or close()"
                )
            )

    def _send_heartbeats(self) -> None:
        """Sends a heartbeat to each rank that has received the previous one. Raises if a rank has
        left the job."""
        with self._shard.changed:  # locked, so that no heartbeat follows this worker's DONE
            if self._shard.alone or self._shard.clocks[self._rank] == _LEFT:
                return
            for rank in range(len(self._shard.clocks)):
                last = self._heartbeats.get(rank)
                if rank == self._rank or (last is not None and not last.poll()):
                    continue
                if last is not None:
                    last.wait()
                self._heartbeats[rank] = self._send_header(HEARTBEAT, rank)

    def _stay(self) -> None:
        """Waits until this rank's worker has left, because other servers wait for its DONE."""
        own = lambda: self._shard.alone or self._shard.clocks[self._rank] == _LEFT  # noqa: E731
        with self._shard.changed:
            while not self._shard.changed.wait_for(own, self._idle):
                self._send_heartbeats()

    def _send_header(self, kind: int, rank: int, number: int = 0) -> Handle[None]:
        header, tag = np.array([kind, number]), self._tag + REQUEST
        return send_async(header, rank, tag=tag, name=NAME, process_set=self._set)

    def lose(self, reason: Exception) -> None:
        """Stops serving, and sends LOST to ranks that may still send requests. For any thread."""
        if self._shard.alone:
            return
        self._shard.fail(reason, alone=True)
        until = monotonic() + _GOODBYE_SECONDS  # limited, because a receiver may have failed
        with suppress(FarandoleError):
            for handle in [self._send_header(LOST, rank, self._lost) for rank in self._listening()]:
                with suppress(FarandoleError):  # that rank has left, too
                    handle.wait(max(0.0, until - monotonic()))

    def report_failure(self) -> None:
        """If this part has failed, tells all other servers, once. A worker that only pushes would
        not notice the failure. For any thread that has just pushed to this part."""
        with self._shard.changed:  # locked, so that no FAILED follows this worker's DONE
            here = self._shard.clocks[self._rank] != _LEFT
            if self._shard.failure is not None and here and not self._failure_reported:
                self._failure_reported = True
                for rank in self._listening():
                    self._send_header(FAILED, rank, self._lost)

    @property
    def _lost(self) -> int:
        """The first rank whose part is lost. Call this only once this rank's part is lost."""
        return self._rank if self._shard.lost is None else self._shard.lost

    def _listening(self) -> list[int]:
        """Other ranks whose servers still run. A server runs until all other workers have left."""
        clocks = self._shard.clocks
        stay = [rank for rank, clock in enumerate(clocks) if clock != _LEFT]
        return [r for r in range(len(clocks)) if r != self._rank and set(stay) - {r}]

    def _body(self, source: int, count: int, values: bool) -> tuple[Array, Array]:
        each = int(np.prod(self._width)) * self._dtype.itemsize if values else 0
        body = np.empty(count * (8 + each), np.uint8)
        recv(body, source, tag=self._tag + BODY, name=NAME, process_set=self._set)
        places, rest = body[: 8 * count].view(np.int64), body[8 * count :]
        self._shard.check_places(places)
        return places, rest.view(self._dtype).reshape(count if values else 0, *self._width)

    def _reply(self, source: int, places: Array) -> None:
        """Sends the number of a rank whose part is lost (-1: none), then the rows."""
        rows = np.ascontiguousarray(self._shard.pull(places)).reshape(-1).view(np.uint8)
        failed = np.array([-1 if self._shard.failure is None else self._lost]).view(np.uint8)
        tag = self._tag + REPLY
        send(np.concatenate([failed, rows]), source, tag=tag, name=NAME, process_set=self._set)


_servers: weakref.WeakSet[ShardServer] = weakref.WeakSet()
