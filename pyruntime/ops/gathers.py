# SPDX-License-Identifier: Apache-2.0
"""The public calls for allgather and reducescatter in all their forms. They are thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, wait_for, waiting
from farandole.calls.requests import Call, Op
from farandole.calls.rows import Table
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops.starts import Average, T, one, reduction, start_rows


def _allgather(
    tensors: Sequence[T], name: str | None, process_set: ProcessSet, timeout: float | None
) -> Handle[list[T]]:
    return start_rows(Call(Op.ALLGATHER, name, set_id(process_set)), tensors, timeout).map(_arrays)


@collective(Op.ALLGATHER)
def grouped_allgather_rows(
    tensors: Sequence[T],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[tuple[T, Table]]]:
    """Allgathers arrays for adapters. Each result comes with every member's number of rows."""
    return start_rows(Call(Op.ALLGATHER, name, set_id(process_set)), tensors, timeout)


def _reducescatter(
    tensors: Sequence[T],
    name: str | None,
    op: int | None,
    process_set: ProcessSet,
    factors: tuple[float, float],
    timeout: float | None,
) -> Handle[list[T]]:
    call = reduction(Op.REDUCESCATTER, op, factors, name, process_set)
    return start_rows(call, tensors, timeout).map(_arrays)


def _arrays(pairs: list[tuple[T, Table]]) -> list[T]:
    return [x for x, _ in pairs]


@collective(Op.ALLGATHER)
def allgather_async(
    tensor: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """Concatenates all ranks' arrays along the first dimension, in rank order.

    Arrays must have at least one dimension. Only the first dimension may differ between ranks. The
    dtype must be equal on all ranks. Returns a handle whose wait() returns a new array of the same
    kind.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allgather_async(np.arange(3)).wait()
        array([0, 1, 2])
    """
    return one(_allgather([tensor], name, process_set, timeout))


@waiting(Op.ALLGATHER)
def allgather(
    tensor: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T:
    """Concatenates all ranks' arrays along the first dimension, in rank order.

    Arrays must have at least one dimension. Only the first dimension may differ between ranks. The
    dtype must be equal on all ranks. Returns a new array of the same kind.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allgather(np.arange(3))
        array([0, 1, 2])
    """
    return wait_for(allgather_async(tensor, name, process_set, timeout=timeout))


@collective(Op.ALLGATHER)
def grouped_allgather_async(
    tensors: Sequence[T],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """Concatenates all ranks' arrays along the first dimension, in rank order.

    Arrays must have at least one dimension. Only the first dimension may differ between ranks.
    Dtypes must be equal on all ranks. Returns a handle whose wait() returns new arrays of the same
    kind.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allgather_async([np.arange(3)]).wait()
        [array([0, 1, 2])]
    """
    return _allgather(tensors, name, process_set, timeout)


@waiting(Op.ALLGATHER)
def grouped_allgather(
    tensors: Sequence[T],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[T]:
    """Concatenates all ranks' arrays along the first dimension, in rank order.

    Arrays must have at least one dimension. Only the first dimension may differ between ranks.
    Dtypes must be equal on all ranks. Returns new arrays of the same kind.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allgather([np.arange(3)])
        [array([0, 1, 2])]
    """
    return wait_for(grouped_allgather_async(tensors, name, process_set, timeout=timeout))


@collective(Op.REDUCESCATTER)
def reducescatter_async(
    tensor: T,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """Reduces arrays and returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Arrays must have at least one dimension. Shape and dtype must be equal on all ranks. If the rows
    cannot be divided evenly, the first ranks get one more row each. A result may be empty. Returns
    a handle whose wait() returns a new array of the same kind.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reducescatter_async(np.arange(3), op=hvd.Sum).wait()
        array([0, 1, 2])
    """
    factors = (prescale_factor, postscale_factor)
    return one(_reducescatter([tensor], name, op, process_set, factors, timeout))


@waiting(Op.REDUCESCATTER)
def reducescatter(
    tensor: T,
    name: str | None = None,
    *,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    timeout: float | None = None,
) -> T:
    """Reduces arrays and returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Arrays must have at least one dimension. Shape and dtype must be equal on all ranks. If the rows
    cannot be divided evenly, the first ranks get one more row each. A result may be empty. Returns
    a new array of the same kind.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reducescatter(np.arange(3), op=hvd.Sum)
        array([0, 1, 2])
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(reducescatter_async(tensor, name, op, process_set, *factors, timeout=timeout))


@collective(Op.REDUCESCATTER)
def grouped_reducescatter_async(
    tensors: Sequence[T],
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """Reduces arrays and returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Arrays must have at least one dimension. Shapes and dtypes must be equal on all ranks. If the
    rows cannot be divided evenly, the first ranks get one more row each. A result may be empty.
    Returns a handle whose wait() returns new arrays of the same kind.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reducescatter_async([np.arange(3)], op=hvd.Sum).wait()
        [array([0, 1, 2])]
    """
    factors = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, name, op, process_set, factors, timeout)


@waiting(Op.REDUCESCATTER)
def grouped_reducescatter(
    tensors: Sequence[T],
    name: str | None = None,
    *,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    timeout: float | None = None,
) -> list[T]:
    """Reduces arrays and returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Arrays must have at least one dimension. Shapes and dtypes must be equal on all ranks. If the
    rows cannot be divided evenly, the first ranks get one more row each. A result may be empty.
    Returns new arrays of the same kind.

    - tensors: arrays of integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: factors for the inputs and the results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reducescatter([np.arange(3)], op=hvd.Sum)
        [array([0, 1, 2])]
    """
    factors = (prescale_factor, postscale_factor)
    return wait_for(
        grouped_reducescatter_async(tensors, name, op, process_set, *factors, timeout=timeout)
    )
