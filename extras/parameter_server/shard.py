# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a ParameterServer: its rows, all workers' clocks, and the thread that answers
other ranks. Used by worker.py only."""

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
PUSH, PULL, TICK, DONE, LOST, STILL_HERE, FAILED = range(7)  # what a message says
NAME = "parameter server"  # of calls and messages, for reports
_GOODBYE_SECONDS = 1.0
_LEFT = float("inf")  # the clock of a worker that has left
REQUEST, BODY, REPLY, TAGS = range(4)  # added to a server's first tag; how many it has


def still_here_seconds() -> float:
    """How long a server is idle until it says so: a receive that waits too long is a stall."""
    limits = [float(setting(f"FARANDOLE_STALL_{name}")) for name in ("WARN", "ABORT")]
    return min((limit for limit in limits if limit > 0), default=30.0) / 3


def check_held(given: Array, dtype: str, what: str) -> None:
    """Raises ValueError for what is not a number, or changes in a table of integers."""
    table = np.dtype(dtype)
    held = given.dtype.kind in "biuf"
    if held and table.kind != "f":
        with np.errstate(invalid="ignore"):  # NaN
            held = bool((given.astype(table) == given).all())
    if not held:
        raise ValueError(f"{what} are {given.dtype}, which a table of {table} can't hold")


class Terms(NamedTuple):
    """What all ranks of a server agree on."""

    shape: tuple[int, ...]
    dtype: str
    initial: float | str
    update: str
    staleness: int | None


class Shard:
    """Rows r of the table with r % n == rank, at r // n; and the clocks. For any thread."""

    def __init__(self, values: Array, update: Update, ranks: int, staleness: int | None) -> None:
        """`values`: the rows' first values; the table itself."""
        self._values = values
        self._update = update
        self._staleness = staleness
        self.changed = threading.Condition()  # with a lock that one thread may take twice
        self.clocks: list[float] = [0] * ranks
        self.failure: Exception | None = None
        self.lost: int | None = None  # the first rank whose part is gone, as far as this one knows
        self.alone = False  # nothing comes from other ranks any more

    def check_places(self, places: Array) -> None:
        """Raises PeerError for places that no rank sends: nothing protects them on their way."""
        if ((places < 0) | (places >= len(self._values))).any():
            raise PeerError(
                f"{NAME}: a request for rows did not arrive as a rank sent it; remedy: check the "
                "network between the hosts, and who can write to it"
            )

    def push(self, places: Array, values: Array) -> None:
        """Updates rows, each once. If the user's function raises, that is the shard's failure."""
        with self.changed:
            try:
                new = np.asarray(self._update(self._values[places], values))
                if new.shape != values.shape:
                    raise ValueError(
                        f"update returned an array of shape {new.shape} for rows of "
                        f"{values.shape}: it returns the new rows"
                    )
                check_held(new, self._values.dtype.name, "rows that update returned")
                self._values[places] = new
            except Exception as reason:
                self.fail(reason)

    def pull(self, places: Array) -> Array:
        """Copies of rows."""
        with self.changed:
            return self._values[places]

    def tick(self, rank: int, clock: float) -> None:
        """Notes a worker's clock."""
        with self.changed:
            self.clocks[rank] = clock
            self.changed.notify_all()

    def wait_fresh(self, clock: float) -> None:
        """Blocks until a worker at this clock may read. Raises what has failed, or StallError."""
        if self._staleness is not None:
            least = clock - self._staleness
            over = lambda: self.failure is not None or min(self.clocks) >= least  # noqa: E731
            self._wait(over, f"pull() at clock {clock:g}")
        self.check()

    def wait_all_left(self) -> None:
        """Blocks until no worker will push or pull any more. Raises StallError."""
        self._wait(lambda: self.alone or min(self.clocks) == _LEFT, "leaving a ParameterServer")

    def _wait(self, over: Callable[[], bool], what: str) -> None:
        """Warns and raises StallError when other waits do, too."""
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
                    f"{self.clocks[slowest]:g}: each rank calls clock() after its pushes, and "
                    "leaves the ParameterServer in the end"
                )
                if end == "ABORT":
                    raise StallError(text)
                warn(text, RuntimeWarning)
            self.changed.wait_for(over)

    def fail(self, reason: Exception, alone: bool = False) -> None:
        """Makes every later call raise the error, the first one; `alone`: no messages will come."""
        with self.changed:
            self.failure = self.failure or reason
            self.alone = self.alone or alone
            self.changed.notify_all()

    def check(self) -> None:
        """Raises what has failed."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)


@on_leave
def abandon_all() -> None:
    """Tells the other ranks that this one leaves the job, with tables that they may still need."""
    for server in list(_servers):
        server.lose(ShutdownError(f"{NAME}: this rank has left the job"))


class Server(threading.Thread):
    """Answers the other ranks' requests to a shard, one after another, until all of them have left.

    It waits for no worker's Python: what a request brings along, and the receive of its reply, are
    posted before the request itself. It always has a receive under way; lest that looks like a
    stall, a server that hears nothing for a while sends a message to all others, as long as its own
    worker has not left. A rank that leaves the job before that sends LOST.
    """

    def __init__(self, shard: Shard, terms: Terms, tag: int, process_set: ProcessSet) -> None:
        """`tag`: the first of TAGS tags."""
        super().__init__(name="farandole.ParameterServer", daemon=True)
        self._shard = shard
        self._width = terms.shape[1:]
        self._dtype = np.dtype(terms.dtype)
        self._tag = tag
        self._set = process_set
        self._rank = process_set.rank() or 0
        self._open = set(range(process_set.size() or 1)) - {self._rank}  # the others' workers
        self._told: dict[int, Handle[None]] = {}  # the last STILL_HERE to each rank
        self._idle = still_here_seconds()
        self._failure_told = False
        _servers.add(self)

    def run(self) -> None:
        """Until all workers have left, or something fails."""
        try:
            while self._open and not self._shard.alone:
                self._serve()
            self._stay()
        except Exception as reason:  # the job has ended, a rank has died, memory is short
            self.lose(reason)
        except BaseException as reason:
            self.lose(FarandoleError(f"{NAME}: update raised {reason!r}"))

    def _serve(self) -> None:
        header = np.empty(2, np.int64)
        handle = recv_async(header, tag=self._tag + REQUEST, name=NAME, process_set=self._set)
        while not done_within(handle, self._idle):
            self._say_still_here()
        source = handle.wait()
        kind, number = header.tolist()  # the rows of a request, a clock, or a lost rank
        if kind == PUSH:
            self._shard.push(*self._body(source, number, values=True))
            self.tell_failure()
        elif kind == PULL:
            self._reply(source, self._body(source, number, values=False)[0])
        elif kind == TICK:
            self._shard.tick(source, number)
        elif kind == FAILED:
            self._hear_lost(number)
        elif kind in (DONE, LOST):
            if kind == LOST:
                self._hear_lost(number)
            self._shard.tick(source, _LEFT)
            self._open.discard(source)

    def _hear_lost(self, rank: int) -> None:
        """The sender's part may be lost because of another rank: that one is told on."""
        with self._shard.changed:
            self._shard.lost = rank if self._shard.lost is None else self._shard.lost
            self._shard.fail(
                PeerError(
                    f"rank {rank} no longer serves its part of a ParameterServer: its own calls "
                    "raise the reason, or it left the job without leaving the ParameterServer "
                    "first, by `with` or close()"
                )
            )

    def _say_still_here(self) -> None:
        """To those who have taken the last one. Raises if a rank has left the job."""
        with self._shard.changed:  # this worker's DONE is the last message that others wait for
            if self._shard.alone or self._shard.clocks[self._rank] == _LEFT:
                return
            for rank in range(len(self._shard.clocks)):
                last = self._told.get(rank)
                if rank == self._rank or (last is not None and not last.poll()):
                    continue
                if last is not None:
                    last.wait()
                self._told[rank] = self._tell(STILL_HERE, rank)

    def _stay(self) -> None:
        """Until this rank's worker has left, too: the others' servers wait for that."""
        own = lambda: self._shard.alone or self._shard.clocks[self._rank] == _LEFT  # noqa: E731
        with self._shard.changed:
            while not self._shard.changed.wait_for(own, self._idle):
                self._say_still_here()

    def _tell(self, kind: int, rank: int, number: int = 0) -> Handle[None]:
        header, tag = np.array([kind, number]), self._tag + REQUEST
        return send_async(header, rank, tag=tag, name=NAME, process_set=self._set)

    def lose(self, reason: Exception) -> None:
        """Serves no more, and tells those who may still ask; for any thread."""
        if self._shard.alone:
            return
        self._shard.fail(reason, alone=True)
        until = monotonic() + _GOODBYE_SECONDS  # somebody's server may have failed
        with suppress(FarandoleError):
            for handle in [self._tell(LOST, rank, self._lost) for rank in self._listening()]:
                with suppress(FarandoleError):  # that rank has left, too
                    handle.wait(max(0.0, until - monotonic()))

    def tell_failure(self) -> None:
        """Tells all, once, if this part has failed: who only pushes would not notice. For any
        thread that has just pushed to it."""
        with self._shard.changed:  # this worker's DONE is the last message that others wait for
            here = self._shard.clocks[self._rank] != _LEFT
            if self._shard.failure is not None and here and not self._failure_told:
                self._failure_told = True
                for rank in self._listening():
                    self._tell(FAILED, rank, self._lost)

    @property
    def _lost(self) -> int:
        """The first rank whose part is gone, once this rank's is."""
        return self._rank if self._shard.lost is None else self._shard.lost

    def _listening(self) -> list[int]:
        """Other ranks whose servers go on: a worker other than theirs has not left."""
        clocks = self._shard.clocks
        stay = [rank for rank, clock in enumerate(clocks) if clock != _LEFT]
        return [r for r in range(len(clocks)) if r != self._rank and set(stay) - {r}]

    def _body(self, source: int, count: int, values: bool) -> tuple[Array, Array]:
        """The places, and the values of a push."""
        each = int(np.prod(self._width)) * self._dtype.itemsize if values else 0
        body = np.empty(count * (8 + each), np.uint8)
        recv(body, source, tag=self._tag + BODY, name=NAME, process_set=self._set)
        places, rest = body[: 8 * count].view(np.int64), body[8 * count :]
        self._shard.check_places(places)
        return places, rest.view(self._dtype).reshape(count if values else 0, *self._width)

    def _reply(self, source: int, places: Array) -> None:
        """The rank that has failed, or -1; and the rows."""
        rows = np.ascontiguousarray(self._shard.pull(places)).reshape(-1).view(np.uint8)
        failed = np.array([-1 if self._shard.failure is None else self._lost]).view(np.uint8)
        tag = self._tag + REPLY
        send(np.concatenate([failed, rows]), source, tag=tag, name=NAME, process_set=self._set)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()
