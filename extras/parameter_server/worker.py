# SPDX-License-Identifier: Apache-2.0
"""ParameterServer: a table that all ranks update and read at their own pace. On each rank, one
thread at a time may use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from farandole.calls.arguments import Argument, check, integer, is_factor
from farandole.calls.public_call import errors_reach_peers
from farandole.errors import FarandoleError, MismatchError, ShutdownError, StallError
from farandole.extras.parameter_server.shard import (
    BODY,
    DONE,
    NAME,
    PULL,
    PUSH,
    REPLY,
    REQUEST,
    TAGS,
    TICK,
    Shard,
    ShardServer,
    TableSettings,
    Update,
    check_held,
)
from farandole.members import ProcessSet, global_process_set
from farandole.messages import recv_async, send_async
from farandole.objects import allgather_object

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

Array = np.ndarray[Any, np.dtype[Any]]
_FIRST_TAG = 1 << 61  # servers' tags start here; tags of users should be smaller
_LOOK_SECONDS = 1.0
_count = 0  # number of servers so far; the highest among the ranks that made the last


class ParameterServer:
    """A table of rows, distributed over the ranks. All ranks push values to rows and pull rows.

    Each rank is a worker, and in a thread also the server of its own rows (row r belongs to rank
    r % n), so the table may be larger than one rank's memory. Each worker has a clock. At clock c,
    a worker reads once every worker's clock is at least c - staleness. It then sees all values that
    were pushed before these clocks (stale synchronous parallel: Ho et al., 2013). With staleness 0,
    the ranks are as synchronous as with an allreduce; with None, pull() never waits.

    Arguments:
        shape: shape of the table; the first dimension counts rows.
        dtype: NumPy dtype of the table and all values.
        initial: a number, or a function (row numbers as int64) -> first values of these rows.
        update: "add", or a function (old rows, pushed values) -> new rows, such as
            `lambda old, grad: old - 0.1 * grad`. The rank that owns the rows calls it.
        staleness: how far a worker's clock may be ahead of the slowest one; None: no limit.
        process_set: the ranks that take part. All create their servers in the same order.

    A `with` block serves this rank's rows until all ranks have left their blocks. A rank that
    leaves by an exception does not wait, and delays no other rank. All ranks raise MismatchError if
    arguments differ; two functions count as equal. When a rank dies, every call raises PeerError.
    Unless staleness is None, a rank that is always slow delays all others.

    Examples:
        >>> with farandole.ParameterServer((1000, 4), staleness=2) as server:
        ...     server.push([3, 5], np.ones((2, 4), "float32"))
        ...     server.clock()
        ...     rows = server.pull([3, 999])
        1
        >>> rows.shape
        (2, 4)
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DTypeLike = "float32",
        *,
        initial: float | Callable[[Array], ArrayLike] = 0,
        update: Literal["add"] | Update = "add",
        staleness: int | None = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._settings, shard, self._tag = _agree(
            shape, dtype, initial, update, staleness, process_set
        )
        self._set = process_set
        self._rank, self._ranks = process_set.rank() or 0, process_set.size() or 1
        self._shard = shard
        self._clock = 0
        self._left = ""  # reason, once this worker has left
        self._sent: list[Any] = []  # handles of messages that may not have arrived
        self._unconfirmed: set[int] = set()  # servers that have not replied since the last push
        self._server = ShardServer(shard, self._settings, self._tag, process_set)
        if self._ranks > 1:
            try:
                self._server.start()
            except BaseException as reason:  # no thread is left, or Ctrl-C
                self._server.lose(ShutdownError(f"{NAME}: this rank does not serve: {reason!r}"))
                raise

    def push(self, rows: ArrayLike | None, values: ArrayLike) -> None:
        """Sends values for rows. Returns before the servers get them; clock() waits for that.

        Arguments:
            rows: int indices, one-dimensional; None: all rows. If a row is listed several times,
                its values are added up first.
            values: array of shape (rows, *table.shape[1:]).

        Raises ValueError for other shapes and unknown rows, and PeerError if a rank has died.
        """
        places = self._rows(rows)
        given = np.asarray(values)
        check_held(given, self._settings.dtype, "values")
        given = given.astype(self._settings.dtype, copy=False)
        if given.shape != (len(places), *self._settings.shape[1:]):
            raise ValueError(
                f"values have shape {given.shape}; for {len(places)} rows of the table pass "
                f"{(len(places), *self._settings.shape[1:])}"
            )
        unique, where = np.unique(places, return_inverse=True)
        if len(unique) < len(places):
            summed = np.zeros((len(unique), *given.shape[1:]), given.dtype)
            np.add.at(summed, where.reshape(-1), given)
            places, given = unique, summed
        with self._leaving_on_error():
            self._wait_for_sent()
            for owner, mine in self._by_owner(places):
                at = places[mine] // self._ranks
                if owner == self._rank:
                    self._shard.push(at, given[mine])
                    self._server.report_failure()
                    self._shard.check()
                else:
                    self._sent += self._ask(owner, PUSH, at, given[mine])
                    self._unconfirmed.add(owner)

    def pull(self, rows: ArrayLike | None = None) -> Array:
        """Returns the values of rows, of shape (rows, *table.shape[1:]). If staleness requires it,
        first waits for slower workers.

        `rows` are int indices, one-dimensional; None: all rows. Raises ValueError for unknown rows,
        PeerError if a rank has died.
        """
        places = self._rows(rows)
        self._shard.wait_fresh(self._clock)
        result = np.empty((len(places), *self._settings.shape[1:]), self._settings.dtype)
        with self._leaving_on_error():
            replies = []
            for owner, mine in self._by_owner(places):
                at = places[mine] // self._ranks
                if owner == self._rank:
                    result[mine] = self._shard.pull(at)
                else:
                    replies.append((mine, self._ask_for(owner, at, result[mine].nbytes)))
            for mine, reply in replies:
                values = self._reply(*reply)
                result[mine] = values.view(result.dtype).reshape(-1, *result.shape[1:])
        return result

    def clock(self) -> int:
        """Publishes this worker's pushes, then advances and returns its clock."""
        self._check()
        with self._leaving_on_error():
            self._wait_for_sent()  # servers then apply these pushes before later requests
            self._clock += 1
            self._sent = self._send_clock(TICK, self._clock)
        return self._clock

    @property
    def clocks(self) -> list[float]:
        """All workers' clocks, as far as this rank knows; infinity for a worker that has left."""
        return list(self._shard.clocks)

    def close(self, wait: bool = True) -> None:
        """Leaves. With `wait`, waits until all ranks have left. A `with` block calls this."""
        if not self._left:
            self._left = "is closed"
            try:
                self._wait_for_sent()
                nothing = np.empty(0, np.int64)
                replies = [self._ask_for(o, nothing, 0) for o in self._unconfirmed if wait]
                for reply in replies:  # each shows that the server has applied the pushes
                    self._reply(*reply)
            finally:
                if not self._shard.alone:
                    with self._shard.changed:  # locked, so that no FAILED follows DONE
                        self._server.report_failure()
                        leaving = self._send_clock(DONE, float("inf"))
                    self._wait(leaving)
        if wait:
            self._shard.wait_all_left()
            if self._server.is_alive():
                self._server.join()
            self._shard.check()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _where: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(FarandoleError):  # the error of the block matters more
                self.close(wait=False)

    def _check(self) -> None:
        self._shard.check()
        if self._left:
            raise ValueError(f"this ParameterServer {self._left}")

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Leaves after an exception such as Ctrl-C: only some servers may know of the call."""
        try:
            yield
        except BaseException as reason:
            with suppress(FarandoleError):
                self.close(wait=False)
            self._left = f"was left: {type(reason).__name__} interrupted a call; make another"
            raise

    def _wait_for_sent(self) -> None:
        sent, self._sent = self._sent, []
        self._wait(sent)

    def _send_clock(self, kind: int, clock: float) -> list[Any]:
        header = np.array([kind, self._clock])
        self._shard.tick(self._rank, clock)  # before the messages, so that none follows DONE
        others = [owner for owner in range(self._ranks) if owner != self._rank]
        return [self._send(header, owner, REQUEST) for owner in others]

    def _wait(self, handles: list[Any]) -> None:
        """Waits for all handles. Raises within seconds if a server has failed and stopped
        receiving."""
        for handle in handles:
            while True:
                try:
                    handle.wait(_LOOK_SECONDS)
                    break
                except StallError as late:
                    if not late.under_way:
                        raise
                    self._shard.check()

    def _ask(self, owner: int, kind: int, places: Array, values: Array | None = None) -> list[Any]:
        """Sends a request; returns the handles to wait for.

        The body is sent first, so a server that gets the request has all that it needs.
        """
        header = np.array([kind, len(places)])
        parts = [places.view(np.uint8)]
        if values is not None:
            parts.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return [
            self._send(np.concatenate(parts), owner, BODY),
            self._send(header, owner, REQUEST),
        ]

    def _ask_for(self, owner: int, places: Array, nbytes: int) -> tuple[int, Array, list[Any]]:
        """Asks a server for rows; returns the arguments for _reply()."""
        into, tag = np.empty(8 + nbytes, np.uint8), self._tag + REPLY
        reply = recv_async(into, owner, tag=tag, name=NAME, process_set=self._set)
        return owner, into, [*self._ask(owner, PULL, places), reply]

    def _reply(self, owner: int, into: Array, handles: list[Any]) -> Array:
        """Waits for the rows and returns their bytes. Raises FarandoleError if the server's part
        has failed."""
        self._wait(handles)
        self._unconfirmed.discard(owner)
        failed = int(into[:8].view(np.int64)[0])
        if failed >= 0:
            raise FarandoleError(
                f"rank {failed} can't serve its rows: calls on that rank raise the reason"
            )
        return into[8:]

    def _send(self, message: Array, owner: int, what: int) -> Any:
        return send_async(message, owner, tag=self._tag + what, name=NAME, process_set=self._set)

    def _rows(self, rows: ArrayLike | None) -> Array:
        self._check()
        count = self._settings.shape[0]
        if rows is None:
            return np.arange(count)
        places = np.asarray(rows)
        if places.ndim != 1 or (places.size and places.dtype.kind not in "iu"):
            raise ValueError(
                f"rows are of shape {places.shape} and {places.dtype}: pass a list of ints"
            )
        unknown = places[(places < 0) | (places >= count)] if places.size else places
        if unknown.size:
            raise ValueError(f"the table has rows 0 to {count - 1}, not {unknown[0]}")
        return places.astype(np.int64)

    def _by_owner(self, places: Array) -> list[tuple[int, Array]]:
        """Returns (rank, positions of its rows in `places`) for each rank that owns some of
        them."""
        owners = places % self._ranks
        parts = [(r, np.flatnonzero(owners == r)) for r in range(self._ranks)]
        return [(owner, mine) for owner, mine in parts if len(mine)]


def _shape_fault(value: Any) -> type[Exception] | None:
    if not isinstance(value, (list, tuple)):
        return TypeError
    faults = [integer(size, 1, 2**63 - 1) for size in value]
    return next((fault for fault in faults if fault), None if value else ValueError)


def _dtype_fault(value: Any) -> type[Exception] | None:
    try:
        return None if value is not None and np.dtype(value).kind in "fiu" else ValueError
    except TypeError:
        return TypeError


_ARGUMENTS = {
    "shape": Argument("pass a list of at least one int, none of them 0", _shape_fault),
    "dtype": Argument("pass a float or integer type of NumPy", _dtype_fault),
    "initial": Argument(
        "pass a number that is not NaN, or a function (rows) -> their first values",
        lambda value: None if callable(value) else is_factor(value),
    ),
    "update": Argument(
        "pass 'add' or a function (old, values) -> new",
        lambda value: None if callable(value) or str(value) == "add" else ValueError,
    ),
    "staleness": Argument(
        "pass an int of at least 0, or None for no bound",
        lambda value: None if value is None else integer(value, 0, 2**62),
    ),
}


def _agree(
    shape: Sequence[int],
    dtype: DTypeLike,
    initial: float | Callable[[Array], ArrayLike],
    update: Literal["add"] | Update,
    staleness: int | None,
    process_set: ProcessSet,
) -> tuple[TableSettings, Shard, int]:
    """(settings that all ranks agree on, this rank's rows, the server's first tag). Collective."""
    global _count
    with errors_reach_peers(process_set, NAME):
        given = {"shape": shape, "dtype": dtype, "initial": initial, "update": update}
        check(_ARGUMENTS, **given, staleness=staleness, process_set=process_set)
        bound = None if staleness is None else index(staleness)
        settings = TableSettings(
            tuple(index(n) for n in shape),
            np.dtype(dtype).name,
            "a function" if callable(initial) else float(initial),
            "a function" if callable(update) else update,
            bound,
        )
        rank, ranks = process_set.rank() or 0, process_set.size() or 1
        rows = np.arange(rank, settings.shape[0], ranks)
        values = np.empty((len(rows), *settings.shape[1:]), settings.dtype)
        first = np.asarray(initial(rows) if callable(initial) else initial)
        check_held(first, settings.dtype, "initial values")
        if first.ndim not in (0, values.ndim):  # NumPy would take rows for columns
            raise ValueError(
                f"initial returned an array of shape {first.shape} for rows of {values.shape}: it "
                "must return their values, or one number"
            )
        values[...] = first
        shard = Shard(values, np.add if update == "add" else update, ranks, bound)
    reports: list[Any] = allgather_object((settings, _count), NAME, process_set)
    if None in reports:
        joined = (process_set.ranks or [])[reports.index(None)]
        raise ValueError(
            f"{NAME}: rank {joined} has joined and can't hold its rows: create the server before "
            "any rank calls join()"
        )
    made = max(one[1] for one in reports)
    _count = made + 1
    for other, (others, _) in enumerate(reports):
        if others != settings:
            raise MismatchError(
                f"{NAME}: rank {rank} creates it with {settings}, rank {other} with {others}: "
                "pass the same arguments on all ranks"
            )
    return settings, shard, _FIRST_TAG + TAGS * made
