# SPDX-License-Identifier: Apache-2.0
"""c10d's work objects over handles of the core, and the threads that complete their futures."""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from farandole.c10d import under_way
from farandole.calls.handles import Handle

__all__ = ["DoneWork", "Futures", "GroupWork"]

_NONE = timedelta(0)  # c10d's word for no time-out of its own

# Before 2.10 (seen in 2.1 to 2.6), torch's C++, such as DDP's constructor, keeps its own half of a
# work only, and once Python's half is gone, waits for ever. So a work that nobody has waited for
# lives on, as long as there are not too many.
_KEEPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10)
_MOST_KEPT = 1000
_kept: dict[int, GroupWork] = {}


def _keep(work: GroupWork) -> None:
    _kept[id(work)] = work
    while len(_kept) > _MOST_KEPT:
        _kept.pop(next(iter(list(_kept))), None)


class _Failed:
    """The value of a failed future.

    Futures of torch take no Python exception. Python's waits unwrap it; C++, such as DDP's, looks
    for tensors in the value by pickling it.
    """

    def __init__(self, reason: BaseException) -> None:
        self.reason = reason

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.reason


def _unwrap(value: Any) -> Any:
    if isinstance(value, _Failed):
        raise value.reason.with_traceback(None)


class Futures:
    """Completes the futures of one group's works, in their order.

    One thread at a time waits. While it completes a future, and so runs what the user has chained
    to that, another one takes its turn: a callback may wait for later work.
    """

    def __init__(self) -> None:
        self._under_way: SimpleQueue[tuple[GroupWork, Future[list[Tensor]]] | None] = SimpleQueue()
        self._turn = threading.Lock()  # to wait
        self._count = threading.Lock()
        self._free = 0  # threads that are in no callback

    def add(self, work: GroupWork, future: Future[list[Tensor]]) -> None:
        """Completes `future` when `work` is done or has failed."""
        self._under_way.put((work, future))
        self._call_up()

    def close(self) -> None:
        """Ends the threads, after what is under way."""
        self._under_way.put(None)

    def _call_up(self) -> None:
        with self._count:
            if self._free > 0 or self._under_way.empty():
                return
            self._free += 1
        threading.Thread(target=self._serve, name="farandole.futures", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._turn:
                pair = self._under_way.get()
                if pair is None:
                    self._under_way.put(None)  # for the others
                    return
                work, future = pair
                failure = work.outcome()
            with self._count:
                self._free -= 1
            self._call_up()
            complete(future, work, failure)
            with self._count:
                self._free += 1
            del pair, work, future, failure  # they would live until the next call


def complete(future: Future[list[Tensor]], work: GroupWork, failure: Exception | None) -> None:
    """Sets the result of a work that has ended, or its failure; runs the future's callbacks."""
    if failure is None:
        future.set_result(work.result())
        return
    future._set_unwrap_func(_unwrap)
    future.set_result(_Failed(failure))  # type: ignore[arg-type]


class GroupWork(Work):
    """One call under way. Any thread may wait; errors are those of farandole."""

    def __init__(
        self, handle: Handle[Any], results: list[Tensor], futures: Futures, devices: list[Any]
    ) -> None:
        """`results` are complete when the handle is done; `devices`: GPUs that they are on."""
        super().__init__()
        self._handle = handle
        self._results = results
        self._futures = futures
        self._devices = devices
        self._future: Future[list[Tensor]] | None = None
        self._making = threading.Lock()
        if _KEEPS:
            _keep(self)

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Blocks until done; raises the call's error, or StallError after the time-out."""
        _kept.pop(id(self), None)
        seconds = timeout.total_seconds()
        self._end(seconds if seconds > 0 else None)
        return True

    def _end(self, seconds: float | None = None) -> None:
        try:
            self._handle.wait(seconds)
        finally:
            if self._handle.numbers is None:  # not after a time-out
                under_way.remove(self)

    @property
    def devices(self) -> list[Any]:
        """GPUs that its results are on."""
        return self._devices

    @property
    def numbers(self) -> tuple[int, ...]:
        """The core's numbers of its calls; none once it has ended."""
        return tuple(self._handle.numbers or ())

    def synchronize(self) -> None:
        """Blocks until done; raises the call's error. The same as wait() without a time-out."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done or has failed; then its results are there."""
        if not self._handle.poll():
            return False
        self.outcome()
        return True

    def is_success(self) -> bool:
        """Whether it is done without error."""
        return self._handle.poll() and self.outcome() is None

    def exception(self) -> Exception | None:
        """Its error; None while it is under way."""
        return self.outcome() if self._handle.poll() else None

    def outcome(self) -> Exception | None:
        """Waits for the end; the error, or None."""
        try:
            self._end()
        except Exception as reason:
            return reason
        return None

    def result(self) -> list[Tensor]:
        """The output tensors; waits for them."""
        self._end()
        return self._results

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the output tensors."""
        _kept.pop(id(self), None)
        with self._making:
            if self._future is not None:
                return self._future
            future: Future[list[Tensor]] = Future(devices=self._devices)
            self._future = future
        if self._handle.poll():
            complete(future, self, self.outcome())
        else:
            self._futures.add(self, future)
        return future


class DoneWork(Work):
    """A call that has succeeded before its caller, which only waits, has seen its work."""

    def __init__(self, results: list[Tensor]) -> None:
        """`results`: the output tensors."""
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Returns at once."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """True."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """None: it has succeeded."""

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._results

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the output tensors, which is done."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self._results)
        return future
