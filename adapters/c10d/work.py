# SPDX-License-Identifier: Apache-2.0
"""c10d's work objects, which use the core's handles, and threads that complete their futures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from farandole.c10d import memory_in_use
from farandole.calls.handles import Handle
from farandole.start.owners import start_owner

__all__ = ["Futures", "GroupWork", "name_in_callback"]

_NONE = timedelta(0)  # c10d passes this to mean the group's time-out

# If C++ code receives a work, such as DDP's reducer in join(), it keeps only the work's C++ half.
# Once the Python half has been freed, that code waits forever or finds no future. Before torch 2.10
# (seen in 2.1 to 2.6), C++ code that starts a call itself also keeps only the C++ half of the work.
# _kept therefore keeps the newest _MOST_KEPT of these works alive:
# - before torch 2.10, every work until Python waits for the work or gets its future;
# - with any version of torch, works that have ended, if their results are small.
_KEEPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10)
_MOST_KEPT = 1000
_SMALL = 1024  # largest size in bytes of a small result's storage
_kept: dict[int, GroupWork] = {}


def _keep(work: GroupWork) -> None:
    _kept[id(work)] = work
    if len(_kept) > _MOST_KEPT:
        with suppress(RuntimeError):  # another thread has changed _kept, and will drop a work
            _kept.pop(next(iter(_kept)), None)


def _is_small(x: Tensor) -> bool:
    # Does not use x.nbytes, because a view keeps all of its storage alive.
    return x.layout is torch.strided and x.untyped_storage().nbytes() <= _SMALL


class _Failed:
    """The value of a failed future, because torch's futures take no Python exception.

    Waits in Python unwrap the error. C++ callers such as DDP pickle the value to find tensors, and
    pickling raises the error.
    """

    def __init__(self, reason: BaseException) -> None:
        self.reason = reason

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.reason


def _unwrap(value: Any) -> Any:
    if isinstance(value, _Failed):
        raise value.reason.with_traceback(None)


class _Callback(threading.local):
    """State of the callback that is running on this thread."""

    future: _Future | None = None  # the running callback's future, or None if no callback runs

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()  # the callback's collectives per process set


_callback = _Callback()


def name_in_callback(group: int, ranks: list[int]) -> str | None:
    """Returns the name of the next collective, if a future's callback makes it, else None.

    `ranks` are the members of the collective's group, and `group` is the number of their process
    set. Ranks run callbacks at different times, so such a call has no place in the order of calls.
    Ranks match it by a name instead. The name consists of the call whose future runs the callback,
    the callback's number, and the collective's number within the callback.
    """
    future = _callback.future
    if future is None or not future.place:
        return None
    # Counts per group, because a rank makes no calls in groups that it does not belong to.
    _callback.calls[group] += 1
    place = future.place
    if not future.ranks.issuperset(ranks):  # some of the ranks have no such future in their groups
        place = place.partition(".")[2]
    return f"callback {place}, call {_callback.calls[group]}"


class _Future(Future[Any]):
    """A future whose callbacks may call collectives.

    The same holds for the futures that then() returns. Ranks match callbacks by number, so all
    ranks must add callbacks in the same order.
    """

    def __init__(self, place: str, ranks: frozenset[int], devices: list[Any]) -> None:
        """`place` is the future's name, which is the same on all `ranks`.

        It starts with the number of their process set. It is "" if other ranks have no counterpart,
        as for the future of a message.
        """
        super().__init__(devices=devices)
        self.place = place
        self.ranks = ranks
        self._devices = devices
        self._added = 0

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Returns a future for the callback's result. The callback receives this future."""
        made = _Future(self._next_place(), self.ranks, self._devices)

        def call(_: Any) -> None:
            try:
                value = made._run(callback, self)
            except BaseException as reason:  # includes SystemExit, or else `made` would never end
                value = _Failed(reason)
                made._set_unwrap_func(_unwrap)
            made.set_result(value)

        super().add_done_callback(call)
        return made

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Runs the callback once this future is complete, and passes this future to it."""
        made = _Future(self._next_place(), self.ranks, self._devices)
        super().add_done_callback(lambda _: made._run(callback, self))

    def _next_place(self) -> str:
        self._added += 1
        return self.place and f"{self.place}.{self._added}"

    def _run(self, callback: Callable[[Any], Any], given: Any) -> Any:
        before = _callback.future, _callback.calls
        _callback.future, _callback.calls = self, Counter()
        try:
            return callback(given)
        finally:
            _callback.future, _callback.calls = before


class Futures:
    """Completes the futures of a group's works, in the order of the works.

    One thread at a time waits for works. While that thread runs a future's callbacks, another
    thread takes over, because a callback may wait for a later work.
    """

    def __init__(self) -> None:
        self._pending: SimpleQueue[tuple[GroupWork, Future[list[Tensor]]] | None] = SimpleQueue()
        self._turn = threading.Lock()  # held by the thread that waits
        # Guards _free and _closed. It is reentrant, because a finalizer may call close().
        self._count = threading.RLock()
        self._free = 0  # number of threads that are not running a callback
        self._closed = False

    def add(self, work: GroupWork, future: Future[list[Tensor]]) -> bool:
        """Completes `future` when `work` is done or has failed. Returns False after close(). Raises
        RuntimeError if no thread can be started; then the future may stay incomplete."""
        # Created before the lock, because it may start the garbage collector, which calls close().
        pair = work, future
        with self._count:
            if self._closed:
                return False
            self._pending.put(pair)
        self._start_thread()
        return True

    def close(self) -> None:
        """Ends the threads once the pending futures are complete."""
        with self._count:
            self._closed = True
            self._pending.put(None)

    def _start_thread(self) -> None:
        with self._count:
            if self._free > 0 or self._pending.empty():
                return
            self._free += 1
        start_owner("farandole.futures", self._serve, self._undo_start)

    def _undo_start(self) -> None:
        with self._count:
            self._free -= 1

    def _serve(self) -> None:
        while True:
            with self._turn:
                pair = self._pending.get()
                if pair is None:
                    self._pending.put(None)  # ends the other threads
                    return
                work, future = pair
                failure = work.outcome()
            with self._count:
                self._free -= 1
            with suppress(RuntimeError):  # no thread is left: this one continues after callbacks
                self._start_thread()
            complete(future, work, failure)
            with self._count:
                self._free += 1
            del pair, work, future, failure  # otherwise they would live until the next pair


def complete(future: Future[list[Tensor]], work: GroupWork, failure: Exception | None) -> None:
    """Sets a future to the result or failure of an ended work. This runs the future's callbacks."""
    if failure is None:
        future.set_result(work.result())
        return
    future._set_unwrap_func(_unwrap)
    future.set_result(_Failed(failure))  # type: ignore[arg-type]


class GroupWork(Work):
    """A call that is under way. Any thread may wait for it. It raises farandole's errors."""

    def __init__(
        self,
        handle: Handle[Any],
        results: list[Tensor],
        futures: Futures | None,
        devices: list[Any],
        place: tuple[object, ...] = (),
        ranks: Iterable[int] = (),
    ) -> None:
        """`results` are complete once the handle is done. `devices` lists the GPUs they are on.
        `futures` completes the work's future in order. If it is None, the future has its own
        thread. `place` holds the number of the group's process set, and the call's name in that
        set. `ranks` are the group's ranks. The name is the same on all of them."""
        super().__init__()
        self._place = place
        self._ranks = ranks
        self._handle = handle
        self._results = results
        self._futures = futures
        self._devices = devices
        self._future: Future[list[Tensor]] | None = None
        self._making = threading.Lock()
        if _KEEPS:
            _keep(self)

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Blocks until the call is done. Raises the call's error, or StallError at the time-out."""
        _kept.pop(id(self), None)
        seconds = timeout.total_seconds()
        self._end(seconds if seconds > 0 else None)
        return True

    def _end(self, seconds: float | None = None) -> None:
        try:
            self._handle.wait(seconds)
        finally:
            if self._handle.numbers is None:  # the call has ended, unlike after a time-out
                memory_in_use.remove(self)
                if all(map(_is_small, self._results)):
                    _keep(self)

    @property
    def devices(self) -> list[Any]:
        """The GPUs that the results are on."""
        return self._devices

    @property
    def numbers(self) -> tuple[int, ...]:
        """The core's handles for this work's calls. Empty once the work has ended."""
        return tuple(self._handle.numbers or ())

    def synchronize(self) -> None:
        """Blocks until the call is done and raises its error. Same as wait() without a time-out."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns True once the call is done or has failed. Results are then complete."""
        if not self._handle.poll():
            return False
        self.outcome()
        return True

    def is_success(self) -> bool:
        """Returns True once the call is done without error."""
        return self._handle.poll() and self.outcome() is None

    def exception(self) -> Exception | None:
        """Returns the call's error, or None if the call has not ended or has succeeded."""
        return self.outcome() if self._handle.poll() else None

    def outcome(self) -> Exception | None:
        """Blocks until the call is done. Returns the call's error, or None."""
        try:
            self._end()
        except Exception as reason:
            return reason
        return None

    def result(self) -> list[Tensor]:
        """Blocks until the call is done. Returns the output tensors."""
        self._end()
        return self._results

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future for the output tensors. Raises RuntimeError if no thread can be
        started."""
        _kept.pop(id(self), None)
        with self._making:
            if self._future is not None:
                return self._future
            self._future = future = _Future(
                ".".join(map(str, self._place)), frozenset(self._ranks), self._devices
            )
        try:
            if self._handle.poll():
                complete(future, self, self.outcome())
            elif self._futures is None or not self._futures.add(self, future):
                own = Futures()
                own.add(self, future)
                own.close()
        except BaseException:
            self._future = None  # nobody may complete it
            raise
        return future
