# SPDX-License-Identifier: Apache-2.0
"""The public calls for allreduce in all its forms. They may be called from any thread."""

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
        return composed[Adasum](list(tensors), in_place, name, factors, process_set, timeout)
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
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shape and dtype must be equal on all ranks. Returns a handle whose wait() returns a new array of
    the same kind, shape and dtype.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shape and dtype must be equal on all ranks. Returns a new array of the same kind, shape and
    dtype.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Overwrites the array with postscale_factor * op(prescale_factor * x) over the ranks.

    The array must be contiguous and writable, and its shape and dtype must be equal on all ranks.
    Do not touch the array until the handle is done. Returns a handle whose wait() returns the same
    array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Overwrites the array with postscale_factor * op(prescale_factor * x) over the ranks.

    The array must be contiguous and writable, and its shape and dtype must be equal on all ranks.
    No other thread may touch the array during the call. Returns the same array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shapes and dtypes must be equal on all ranks. The list forms one call, which succeeds or fails
    as a whole. Returns a handle whose wait() returns new arrays of the same kind, shape and dtype.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shapes and dtypes must be equal on all ranks. The list forms one call, which succeeds or fails
    as a whole. Returns new arrays of the same kind, shape and dtype.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Overwrites the arrays with postscale_factor * op(prescale_factor * x) over the ranks.

    The arrays must be contiguous and writable, and their shapes and dtypes must be equal on all
    ranks. The list forms one call, which succeeds or fails as a whole. Do not touch the arrays
    until the handle is done. Returns a handle whose wait() returns the same arrays.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

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
    """Overwrites the arrays with postscale_factor * op(prescale_factor * x) over the ranks.

    The arrays must be contiguous and writable, and their shapes and dtypes must be equal on all
    ranks. The list forms one call, which succeeds or fails as a whole. No other thread may touch
    the arrays during the call. Returns the same arrays.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max, Product or Adasum. `average` is deprecated.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce_([np.ones(2)], op=hvd.Sum, prescale_factor=3.0)
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(
        grouped_allreduce_async_(tensors, average, name, op, *factors, process_set, timeout=timeout)
    )
