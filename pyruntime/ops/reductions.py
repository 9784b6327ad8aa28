# SPDX-License-Identifier: Apache-2.0
"""allreduce in all its forms: public calls, for any thread."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.calls.handles import Handle
from farandole.calls.prepared import repeating, repeating_wait
from farandole.calls.public_call import collective, wait_for, waiting
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops.starts import Adasum, T, composed, one, reduce_op_of, reduction, start


def _allreduce(
    tensors: Sequence[T],
    average: bool | None,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    timeout: float | None,
    in_place: bool = False,
) -> Handle[list[T]]:
    op = reduce_op_of(op, average)
    if op == Adasum:
        return composed[Adasum](tensors, in_place, name, factors, process_set, timeout)
    call = reduction(Op.ALLREDUCE, op, factors, name, process_set)
    return start(call, tensors, timeout, in_place)


@repeating
@collective(Op.ALLREDUCE)
def allreduce_async(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. Returns a handle, whose wait() gives a new array
    of the same kind, shape and dtype.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce_async(np.ones(2), op=hvd.Sum, prescale_factor=3.0).wait()
        array([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    return one(_allreduce([tensor], average, name, op, factors, process_set, timeout))


@waiting(Op.ALLREDUCE)
@repeating_wait
def allreduce(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> T:
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. Returns a new array of the same kind, shape and
    dtype.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce(np.ones(2), op=hvd.Sum, prescale_factor=3.0)
        array([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(
        allreduce_async(tensor, average, name, op, *factors, process_set, timeout=timeout)
    )


@repeating
@collective(Op.ALLREDUCE)
def allreduce_async_(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """The array becomes postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Contiguous and writable, of equal shape and dtype on all ranks; nobody else may touch it until
    the call is done. Returns a handle, whose wait() gives this very array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce_async_(np.ones(2), op=hvd.Sum, prescale_factor=3.0).wait()
        array([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    return one(_allreduce([tensor], average, name, op, factors, process_set, timeout, True))


@waiting(Op.ALLREDUCE)
@repeating_wait
def allreduce_(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T:
    """The array becomes postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Contiguous and writable, of equal shape and dtype on all ranks; nobody else may touch it until
    the call is done. Returns this very array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce_(np.ones(2), op=hvd.Sum, prescale_factor=3.0)
        array([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(
        allreduce_async_(tensor, average, name, op, *factors, process_set, timeout=timeout)
    )


@collective(Op.ALLREDUCE)
def grouped_allreduce_async(
    tensors: Sequence[T],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Returns a handle, whose wait() gives new arrays of the same kind, shape and dtype.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce_async([np.ones(2)], op=hvd.Sum, prescale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return _allreduce(tensors, average, name, op, factors, process_set, timeout)


@waiting(Op.ALLREDUCE)
def grouped_allreduce(
    tensors: Sequence[T],
    average: bool | None = None,
    name: str | None = None,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> list[T]:
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Returns new arrays of the same kind, shape and dtype.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce([np.ones(2)], op=hvd.Sum, prescale_factor=3.0)
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(
        grouped_allreduce_async(tensors, average, name, op, *factors, process_set, timeout=timeout)
    )


@collective(Op.ALLREDUCE)
def grouped_allreduce_async_(
    tensors: Sequence[T],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """Arrays become postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Contiguous and writable, of equal shape and dtype on all ranks; nobody else may touch them until
    the call is done. A list is reduced together, all of it or nothing. Returns a handle, whose
    wait() gives these very arrays.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce_async_([np.ones(2)], op=hvd.Sum, prescale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return _allreduce(tensors, average, name, op, factors, process_set, timeout, True)


@waiting(Op.ALLREDUCE)
def grouped_allreduce_(
    tensors: Sequence[T],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[T]:
    """Arrays become postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Contiguous and writable, of equal shape and dtype on all ranks; nobody else may touch them until
    the call is done. A list is reduced together, all of it or nothing. Returns these very arrays.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; average: its deprecated form.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce_([np.ones(2)], op=hvd.Sum, prescale_factor=3.0)
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(
        grouped_allreduce_async_(tensors, average, name, op, *factors, process_set, timeout=timeout)
    )
