# SPDX-License-Identifier: Apache-2.0
"""reduce, whose result one rank gets, in all its forms: public calls, for any thread."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.calls.handles import Handle
from farandole.calls.prepared import repeating
from farandole.calls.public_call import collective, wait_for, waiting
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops.starts import T, one, reduction, start


def _reduce(
    tensors: Sequence[T],
    root_rank: int,
    op: int | None,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
    in_place: bool = False,
) -> Handle[list[T]]:
    call = reduction(Op.REDUCE, op, factors, name, process_set, root_rank)
    return start(call, tensors, timeout, in_place)


@repeating
@collective(Op.REDUCE)
def reduce_async(
    tensor: T,
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. Returns a handle, whose wait() gives a new array
    of the same kind on the root, and elsewhere the array that was given, as it is.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reduce_async(np.ones(2), root_rank=0, postscale_factor=3.0).wait()
        array([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    return one(_reduce([tensor], root_rank, op, factors, name, process_set, timeout))


@waiting(Op.REDUCE)
@repeating
def reduce(
    tensor: T,
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. Returns a new array of the same kind on the root,
    and elsewhere the array that was given, as it is.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reduce(np.ones(2), root_rank=0, postscale_factor=3.0)
        array([3., 3.])
    """
    terms = (op, prescale_factor, postscale_factor, name, process_set)
    return wait_for(reduce_async(tensor, root_rank, *terms, timeout=timeout))


@repeating
@collective(Op.REDUCE)
def reduce_async_(
    tensor: T,
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """The root's array becomes postscale_factor * op(prescale_factor * x), in place.

    That of other ranks stays as it is. Contiguous and writable, of equal shape and dtype on all
    ranks; nobody else may touch it until the call is done. Returns a handle, whose wait() gives
    this very array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reduce_async_(np.ones(2), root_rank=0, postscale_factor=3.0).wait()
        array([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    return one(_reduce([tensor], root_rank, op, factors, name, process_set, timeout, True))


@waiting(Op.REDUCE)
@repeating
def reduce_(
    tensor: T,
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T:
    """The root's array becomes postscale_factor * op(prescale_factor * x), in place.

    That of other ranks stays as it is. Contiguous and writable, of equal shape and dtype on all
    ranks; nobody else may touch it until the call is done. Returns this very array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reduce_(np.ones(2), root_rank=0, postscale_factor=3.0)
        array([3., 3.])
    """
    terms = (op, prescale_factor, postscale_factor, name, process_set)
    return wait_for(reduce_async_(tensor, root_rank, *terms, timeout=timeout))


@collective(Op.REDUCE)
def grouped_reduce_async(
    tensors: Sequence[T],
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Returns a handle, whose wait() gives new arrays of the same kind on the root, and elsewhere the
    arrays that were given, as they are.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reduce_async([np.ones(2)], root_rank=0, postscale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return _reduce(tensors, root_rank, op, factors, name, process_set, timeout)


@waiting(Op.REDUCE)
def grouped_reduce(
    tensors: Sequence[T],
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[T]:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Returns new arrays of the same kind on the root, and elsewhere the arrays that were given, as
    they are.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reduce([np.ones(2)], root_rank=0, postscale_factor=3.0)
        [array([3., 3.])]
    """
    terms = (op, prescale_factor, postscale_factor, name, process_set)
    return wait_for(grouped_reduce_async(tensors, root_rank, *terms, timeout=timeout))


@collective(Op.REDUCE)
def grouped_reduce_async_(
    tensors: Sequence[T],
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """The root's arrays become postscale_factor * op(prescale_factor * x), in place.

    Those of other ranks stay as they are. Contiguous and writable, of equal shape and dtype on all
    ranks; nobody else may touch them until the call is done. A list is reduced together, all of it
    or nothing. Returns a handle, whose wait() gives these very arrays.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reduce_async_([np.ones(2)], root_rank=0, postscale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return _reduce(tensors, root_rank, op, factors, name, process_set, timeout, True)


@waiting(Op.REDUCE)
def grouped_reduce_(
    tensors: Sequence[T],
    root_rank: int,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[T]:
    """The root's arrays become postscale_factor * op(prescale_factor * x), in place.

    Those of other ranks stay as they are. Contiguous and writable, of equal shape and dtype on all
    ranks; nobody else may touch them until the call is done. A list is reduced together, all of it
    or nothing. Returns these very arrays.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the rank of the world that gets the result, a member of the process set.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reduce_([np.ones(2)], root_rank=0, postscale_factor=3.0)
        [array([3., 3.])]
    """
    terms = (op, prescale_factor, postscale_factor, name, process_set)
    return wait_for(grouped_reduce_async_(tensors, root_rank, *terms, timeout=timeout))
