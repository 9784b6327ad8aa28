# SPDX-License-Identifier: Apache-2.0
"""Handles, which asynchronous calls return, and functions that wait for handles. They may be used
from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from farandole._library import check_count, error, ffi, lib
from farandole.arrays.buffers import Buffer, ResultMemory
from farandole.arrays.cuda_array import CudaArray
from farandole.arrays.kinds import Shape
from farandole.calls import leases, part
from farandole.calls.leases import numbers_of
from farandole.errors import ShutdownError, StallError

T = TypeVar("T")
R = TypeVar("R")
SLICE = 0.15  # seconds per wait in the core; Python handles signals between waits
_ANSWER_SECONDS = 1.0  # limit for the coordinator's answer in explanation()
_EXPLANATION_BYTES = 1 << 14
_OK, _PENDING = lib.FARANDOLE_OK, lib.FARANDOLE_PENDING
_finish = lib.farandole_finish
_end_one, _lost = leases.end_one, leases.lost
_making_locks = threading.RLock()  # guards the creation of Handle._lock


class Handle(Generic[T]):
    """An asynchronous call. wait() returns its result or raises its error."""

    __slots__ = (
        "__weakref__",
        "_collect",
        "_error",
        "_lock",
        "_numbers",
        "_timeout",
        "_value",
        "_what",
        "prepared",
    )

    def __init__(
        self,
        numbers: Any,
        collect: Callable[[Any], T] | None,
        what: object,
        timeout: float | None = None,
    ) -> None:
        """`numbers` holds the core's handles. `collect` makes the result from `numbers`. `what`
        names the call in errors. `timeout` is the default limit for waits, in seconds."""
        self._numbers = numbers
        self._collect = collect
        self._what = what
        self._timeout = timeout
        self._lock: Any = None  # created by the first wait that needs it
        self._error: Exception | None = None
        self._value: T
        self.prepared: Any = None  # a prepared.RepeatedCall that makes the call again

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the call is done and returns its result.

        Raises the call's error if it fails. Raises StallError after `timeout` seconds; in that case
        the call continues, and you may wait again. If an exception, such as Ctrl-C, ends a wait,
        this rank leaves the job.
        """
        limit = self._timeout if timeout is None else timeout
        try:
            late = self._settle(limit)
        except BaseException as reason:
            part.end(reason)
            raise
        if late is not None:
            raise late
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    @property
    def numbers(self) -> Any:
        """The core's handles, or None once a wait has stored the outcome."""
        return self._numbers

    def _settle(self, limit: float | None) -> Exception | None:
        """Waits, one thread at a time, and stores the outcome. Returns a StallError if the time is
        up. Raises only exceptions that come from signal handlers."""
        lock = self._lock
        if lock is None:
            with _making_locks:
                lock = self._lock = self._lock or threading.RLock()
        try:
            if not lock.acquire(timeout=-1 if limit is None else max(limit, 0.0)):
                return stall(str(self._what), limit)
            numbers = self._numbers
            if numbers is not None:
                failure = self._lost() or self._outcome(numbers, limit)
                if getattr(failure, "under_way", False):
                    return failure
                self._complete(numbers, failure)
        finally:  # Ctrl-C may come as soon as the lock is taken
            if lock._is_owned():
                lock.release()
        return None

    def _outcome(self, numbers: Any, limit: float | None) -> Exception | None:
        """Waits. Returns None, the call's error if it fails, or a StallError if the time is up."""
        return _block(numbers, limit, str(self._what))

    def map(self, change: Callable[[T], R]) -> Handle[R]:
        """Returns this handle, whose result `change` will convert. Call this before any wait."""
        collect = self._collect
        if collect is None:
            value = self._value
            collect = lambda _: value  # noqa: E731
        changed = cast("Handle[R]", self)
        changed._collect = lambda numbers: change(collect(numbers))
        return changed

    @property
    def result(self) -> T:
        """The call's result. Reading this property waits for it."""
        return self.wait()

    def poll(self) -> bool:
        """True if the call is done or has failed. Does not wait."""
        numbers = self._numbers
        if numbers is None or self._lost():
            return True
        return all(lib.farandole_poll(n) != 0 for n in numbers)

    def _lost(self) -> Exception | None:
        if self._numbers is None or not _lost(self._numbers):
            return None
        return ShutdownError(f"{self._what} was under way at the last shutdown()")

    def _complete(self, numbers: Any, failure: Exception | None) -> None:
        if failure is None and self._collect is not None:
            try:
                self._value = self._collect(numbers)
            except Exception as reason:  # stored, because a result can be taken only once
                failure = reason
        if failure is not None and self._numbers is None:
            return  # a signal handler or a finalizer has waited for this call during this wait
        self._error = failure
        # Set before the release, so that a second wait finds the result.
        self._numbers = self._collect = None
        self._let_go(numbers, failure)

    def _let_go(self, numbers: Any, failure: Exception | None) -> None:
        """Releases the core's handles. After a failure, leaves the handles to sweep(), because
        other tensors of the group may not have ended."""
        if failure is None:
            leases.end(numbers)
        else:
            leases.drop(numbers)

    def __del__(self) -> None:
        if getattr(self, "_numbers", None) is not None:
            leases.drop(self._numbers)

    def __repr__(self) -> str:
        state = "under way" if self._numbers is not None else "failed" if self._error else "done"
        return f"<Handle {self._what}: {state}>"


class OneHandle(Handle[T]):
    """A handle for one tensor whose result array exists already. Most waits call the core once."""

    __slots__ = ()

    def __init__(self, number: int, value: T, what: object, timeout: float | None) -> None:
        """`value` is the result. `number` is the core's handle, or 0 if the call is done."""
        self._numbers = (number,) if number else None
        self._collect = None
        self._what = what
        self._timeout = timeout
        self._lock = self._error = None
        self._value = value

    def wait(self, timeout: float | None = None) -> T:
        """Waits, then returns the call's result or raises its error."""
        numbers = self._numbers
        if numbers is None and self._error is None:
            return self._value
        limit = self._timeout if timeout is None else timeout
        mine = numbers is not None and self._collect is None and (limit is None or limit >= SLICE)
        try:
            if mine and _finish(numbers[0], SLICE) == _OK:  # true in one thread at most
                self._numbers = None
                _end_one(numbers[0], None)
                return self._value
        except BaseException as reason:
            part.end(reason)
            raise
        return super().wait(timeout)

    def _complete(self, numbers: Any, failure: Exception | None) -> None:
        """Stores the result or the error. If the core does not know the handle, another thread's
        wait() has released the handle, so the call has succeeded."""
        here = failure is not None and not _lost(numbers)
        if here and lib.farandole_settled(numbers[0]) == -lib.FARANDOLE_E_ARGUMENT:
            _end_one(numbers[0], None)
            failure = None
        super()._complete(numbers, failure)


def _block(numbers: Any, timeout: float | None, what: str) -> Exception | None:
    """Waits for all handles. Returns None if they succeed, the error of a handle that fails, or a
    StallError if the time is up."""
    code = wait_until(numbers, None if timeout is None else monotonic() + timeout)
    if code == _PENDING:
        return stall(what, timeout, explanation(numbers))
    return None if code == _OK else error(code, what)


def explanation(numbers: Any) -> str:
    """Asks the coordinator which ranks the first unfinished call waits for. Returns "" if there is
    no such call or no answer."""
    waiting = [number for number in numbers if is_under_way(number)]
    if not waiting:
        return ""
    text = ffi.new("char[]", _EXPLANATION_BYTES)
    length = lib.farandole_explain(waiting[0], _ANSWER_SECONDS, text, _EXPLANATION_BYTES)
    return ffi.string(text).decode(errors="replace") if length > 0 else ""


def stall(what: str, timeout: float | None, why: str = "") -> StallError:
    """Returns the StallError for a wait of `timeout` seconds. `why` names the missing ranks."""
    why = why or "this rank has submitted it and waits for others"
    error = StallError(
        f"{what}: not done within the timeout of {timeout:g} s; {why}\n"
        "  (you may wait for the call again)"
    )
    error.under_way = True
    return error


def wait_until(handles: Any, deadline: float | None) -> int:
    """Waits for the core's handles until time.monotonic() reaches `deadline`. None means no limit.

    The wait is split into slices, so that Python can handle signals. Returns FARANDOLE_OK,
    FARANDOLE_PENDING if the time is up, or the code of a failure for farandole._library.error(). If
    a signal handler raises, this rank leaves the job.
    """
    count = len(handles)
    if count == 0:  # an empty group
        return int(_OK)
    numbers = numbers_of(handles)
    wait = -SLICE  # a negative time tells the core to expect further waits
    try:
        while True:
            if deadline is not None:
                wait = max(0.0, min(SLICE, deadline - monotonic()))
            code = int(lib.farandole_wait(numbers, count, wait))
            if code != _PENDING or (deadline is not None and monotonic() >= deadline):
                return code
    except BaseException as reason:
        part.end(reason)
        raise


def done_within(handle: Handle[Any], seconds: float) -> bool:
    """Returns True if a call on one tensor ends or fails within `seconds`. Signals are not handled
    during the wait, so call this only from threads that handle no signals."""
    numbers = handle._numbers
    return numbers is None or bool(lib.farandole_wait(numbers_of(numbers), 1, seconds) != _PENDING)


def is_under_way(number: int) -> bool:
    """Returns True if this handle of the core is neither done nor failed."""
    return bool(lib.farandole_poll(number) == 0)


def _result(number: int) -> Any:
    result = ffi.new("farandole_result*")
    code = lib.farandole_result_of(number, result)
    if code != _OK:
        raise error(code)
    return result


def is_absent(number: int) -> bool:
    """True if no rank passed a buffer to this finished call, so that it wrote no output."""
    return bool(_result(number).absent)


def value_of(number: int) -> int:
    """Returns a finished handle's number: the last rank to join, or a new process set's id."""
    return int(_result(number).value)


def take(number: int, buffer: Buffer, stream: int) -> tuple[ResultMemory | CudaArray, Shape]:
    """Takes the memory that the core allocated for a finished handle's result. For an allgather or
    alltoall, also returns each member's number of rows, which is 0 for a member that has joined.

    `buffer` is the input. `stream` is the first stream that reads a result on a GPU.
    """
    result = _result(number)
    # Not in result.shape, because a signal handler may look at another result on this thread.
    count = result.ndim + result.n_received
    sizes = ffi.new("int64_t[]", count)
    check_count(lib.farandole_sizes_of(number, sizes, count))
    shape, received = tuple(sizes[0 : result.ndim]), tuple(sizes[result.ndim : count])
    if buffer.device >= 0:
        pointer = _nonzero(lib.farandole_take(number))
        return CudaArray.taken(pointer, buffer.dtype, shape, buffer.device, stream), received
    pointer = ffi.gc(_nonzero(lib.farandole_take(number)), lib.farandole_free)
    return ResultMemory(pointer, buffer.dtype, shape), received


def _nonzero(pointer: Any) -> Any:
    if pointer == ffi.NULL:
        raise error(lib.farandole_error_code())
    return pointer
