# SPDX-License-Identifier: Apache-2.0
"""allreduce with op=Adasum (Maleki et al., 2020, arXiv:2006.02924).

Adasum averages parallel vectors and adds orthogonal ones. It is applied along a binary tree whose
leaves are the ranks in order:

Adasum(a, b) = (1 - a.b / 2a.a) a + (1 - a.b / 2b.b) b

The result is therefore a linear combination of the ranks' tensors. Its coefficients depend only on
the tensors' dot products. Each rank computes the dot products of one stripe of all tensors, a small
allreduce adds them up, and an allreduce of the scaled tensors gives the result.

GPU tensors are copied to the host and back. Each call runs on a separate thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

import numpy as np

from farandole import ops
from farandole._library import check, ffi, is_from_core, lib
from farandole.arrays.buffers import DTYPES, Buffer, check_apart, check_unused, dtype_of
from farandole.calls import part
from farandole.calls.handles import Handle, stall
from farandole.calls.requests import Call, Op, count_unnamed, is_told, refuse, submit, told
from farandole.errors import FarandoleError
from farandole.members import ProcessSet, set_id
from farandole.ops import starts

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
Float64 = np.ndarray[Any, np.dtype[np.float64]]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COLUMNS = 1 << 16  # number of elements per rank that are converted to float64 at a time
_LABELS = 256  # number of labels that unnamed calls use in rotation
_ROUNDING = 64 * np.finfo(np.float64).eps


def adasum_async(
    tensors: Sequence[T],
    in_place: bool,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    timeout: float | None,
) -> Handle[list[T]]:
    """Starts the Adasum of each tensor over the members of a set, multiplied by both `factors`.

    Tensors must be floating point. They may have any shape, but dtypes and shapes must be equal on
    all ranks. Dot products are computed in float64, and sums of 16-bit tensors in float32. Raises
    TypeError for other dtypes. wait() raises FarandoleError if a rank has joined, and otherwise the
    same errors as allreduce.
    """
    number = set_id(process_set)
    kinds, inputs = starts.describe(tensors, in_place)
    for i, buffer in enumerate(inputs):
        if DTYPES[buffer.dtype] not in _FLOATS:
            raise TypeError(
                f"tensors[{i}] has dtype {DTYPES[buffer.dtype]}: Adasum takes floats only; convert "
                "it, or choose a different op"
            )
        _check_unused(buffer, writes=in_place)
    results, outputs = list(tensors), inputs
    if in_place:
        check_apart(inputs)
    else:
        results, outputs = starts.new_results(kinds, tensors, inputs)
    # Other calls may run between the rounds of this call and change the caller's memory.
    copies = [_copied(x, y) for x, y in zip(inputs, outputs, strict=True)]
    call = Call(Op.ALLREDUCE, name, number, ops.Adasum)
    label = f"Adasum of {name}" if name else f"unnamed Adasum {count_unnamed(number) % _LABELS}"
    # Submits a call without data, so that the core checks that all ranks make the same request.
    bare = [Buffer(0, buffer.dtype, buffer.shape, None) for buffer in inputs]
    declared = Handle(submit(call, bare, own=1), lambda _: None, str(call))

    def work() -> list[T]:
        declared.wait()
        _combine(inputs, outputs, copies, label, factors, process_set)
        return results if in_place else starts.sealed(kinds, results, tensors)

    return _Working(work, str(call), timeout)


starts.composed[ops.Adasum] = adasum_async


class _Working(Handle[list[T]]):
    """A handle for a call that takes several rounds.

    Each handle has a thread, so calls make progress in whatever order the program waits for them.
    """

    def __init__(self, work: Callable[[], list[T]], what: str, timeout: float | None) -> None:
        super().__init__(ffi.new("int64_t[]", 0), lambda _: self._results, what, timeout)
        self._results: list[T] = []
        self._failure: Exception | None = None
        self._finished = threading.Event()
        try:
            threading.Thread(target=self._run, args=(work,), name=what, daemon=True).start()
        except RuntimeError as reason:  # no thread is left
            part.end(reason)  # the other ranks wait for this rank's part in the rounds
            raise

    def _run(self, work: Callable[[], list[T]]) -> None:
        try:
            self._results = work()
        except Exception as reason:
            if not (isinstance(reason, FarandoleError) or is_told(reason) or is_from_core(reason)):
                part.end(reason)  # the other ranks wait or already have their results
            self._failure = reason
        self._finished.set()

    def _outcome(self, _numbers: Any, limit: float | None) -> Exception | None:
        return self._failure if self._finished.wait(limit) else stall(str(self._what), limit)

    def poll(self) -> bool:
        return self._numbers is None or self._finished.is_set()


def _combine(
    inputs: list[Buffer],
    outputs: list[Buffer],
    copies: list[Array | None],
    label: str,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> None:
    """Writes the Adasum of all members' inputs to the outputs. All members pass the same label.
    `copies` holds the result of _copied() for each input."""
    own = process_set.rank()
    assert own is not None
    sources = [_flat(x) if copy is None else copy for x, copy in zip(inputs, copies, strict=True)]
    grams = _dot_products(sources, label, process_set)
    # For GPU tensors, the host copies of the inputs are scaled.
    targets = [
        source if output.device >= 0 else _raw(output)
        for source, output in zip(sources, outputs, strict=True)
    ]
    scaled: list[Array] = []
    with np.errstate(all="ignore"):  # the result may hold infinities and NaN
        with _told(f"{label}.sum", process_set):
            for source, output in zip(sources, outputs, strict=True):
                _check_unchanged(source, output)
        for source, target, gram in zip(sources, targets, grams, strict=True):
            scaled.append(_scaled(source, coefficients(gram)[own], target))
        ops.grouped_allreduce_(
            scaled,
            op=ops.Sum,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            name=f"{label}.sum",
            process_set=process_set,
        )
        for source, wide, target, output in zip(sources, scaled, targets, outputs, strict=True):
            if wide is not target:
                _check_unchanged(source, output)
                _store(wide, target)
            if output.device >= 0:
                _copy(output, output.pointer, _address(target), target.nbytes)


def _dot_products(tensors: list[Array], label: str, process_set: ProcessSet) -> Float64:
    """Returns each tensor's dot products between all p members, in shape (tensors, p, p)."""
    members = process_set.size()
    assert members is not None
    handles = []
    for i, flat in enumerate(tensors):
        count = flat.shape[0]
        splits = [count // members + (r < count % members) for r in range(members)]
        name = f"{label}.stripes.{i}"
        handles.append(ops.alltoall_async(flat, splits, name=name, process_set=process_set))
    sums = np.zeros(len(tensors) * members**2 + 1)
    sums[-1] = 1.0  # the allreduce thereby counts the members that take part
    grams: Float64 = sums[:-1].reshape(len(tensors), members, members)
    for gram, handle in zip(grams, handles, strict=True):
        stripes, rows = handle.wait()
        if stripes.shape[0] == rows[0] * members:  # otherwise a rank has joined, as sums[-1] shows
            gram[:] = _gram(stripes, members)
    ops.allreduce_(sums, op=ops.Sum, name=f"{label}.dots", process_set=process_set)
    if sums[-1] != members:
        raise FarandoleError(
            f"{label}: {members - int(sums[-1])} of {members} ranks have joined; Adasum needs all"
        )
    return grams


def _gram(stripes: Array, members: int) -> Float64:
    """Splits a (p * n,) array into p rows. Returns the rows' dot products (p, p) in float64."""
    stripes = stripes.reshape(members, -1)
    total = np.zeros((len(stripes), len(stripes)))
    with np.errstate(all="ignore"):
        for begin in range(0, stripes.shape[1], _COLUMNS):
            rows = _widened(stripes[:, begin : begin + _COLUMNS]).astype(np.float64)
            total += rows @ rows.T
    return total


def coefficients(gram: Float64) -> Float64:
    """Returns the p coefficients of Adasum as a linear combination of p vectors.

    `gram` (p, p) holds the vectors' dot products. Neighbours are combined first: p vectors are
    split at the largest power of two below p.
    """
    return _node(gram, 0, len(gram))


def _node(gram: Float64, begin: int, end: int) -> Float64:
    if end - begin == 1:
        leaf = np.zeros(len(gram))
        leaf[begin] = 1.0
        return leaf
    middle = begin + (1 << ((end - begin - 1).bit_length() - 1))
    a, b = _node(gram, begin, middle), _node(gram, middle, end)
    dot = a @ gram @ b
    return np.asarray((1 - _share(dot, a, gram)) * a + (1 - _share(dot, b, gram)) * b)


def _share(dot: Any, v: Float64, gram: Float64) -> float:
    """Returns dot / 2|v|^2, or 0 if `v` is zero up to rounding."""
    square = float(v @ gram @ v)
    largest = float(np.abs(v) @ np.abs(gram) @ np.abs(v))
    return 0.0 if square <= _ROUNDING * largest else float(dot) / (2 * square)


# ---- memory


def _check_unused(buffer: Buffer, writes: bool) -> None:
    """Raises ValueError if another call uses this memory. The core cannot check that, because this
    module reads and writes the memory between its calls of the core."""
    if buffer.device < 0:
        nbytes = prod(buffer.shape) * dtype_of(buffer.dtype).itemsize
        check_unused(buffer.pointer, nbytes, (), (), writes)


def _check_unchanged(source: Array, output: Buffer) -> None:
    """Raises ValueError if a call uses the output or has changed it since its values were copied to
    `source`. Does not check GPU memory."""
    if output.device < 0 and output.pointer != _address(source):
        _check_unused(output, writes=True)
        if not np.array_equal(_raw(output).view(np.uint8), source.view(np.uint8)):
            raise ValueError(
                "a tensor was changed while its Adasum was under way: wait for each call on a "
                "tensor before you start the next one, or pass a copy"
            )


@contextmanager
def _told(name: str, process_set: ProcessSet) -> Iterator[None]:
    """Context manager that reports a ValueError to the ranks waiting in the allreduce called
    `name`."""
    try:
        yield
    except ValueError as reason:
        refuse(Call(Op.ALLREDUCE, name, set_id(process_set)), reason)
        raise told(reason) from None


def _copied(buffer: Buffer, output: Buffer) -> Array | None:
    """Returns a flat copy of the buffer's values. The copy is in the output's memory unless the
    call is in place. Returns None for a GPU buffer, because the call's thread copies that later."""
    if buffer.device >= 0:
        return None
    in_place = output.pointer == buffer.pointer
    copy: Array = np.empty_like(_raw(buffer)) if in_place else _raw(output)
    copy[:] = _raw(buffer)
    return copy


def _flat(buffer: Buffer) -> Array:
    """Returns a flat array over the buffer's memory, or over a host copy of a GPU buffer."""
    if buffer.device < 0:
        return _raw(buffer)
    copy = np.empty(prod(buffer.shape), dtype_of(buffer.dtype))
    _copy(buffer, _address(copy), buffer.pointer, copy.nbytes)
    return copy


def _address(x: Array) -> int:
    return int(x.__array_interface__["data"][0])


def _copy(on_gpu: Buffer, target: int, source: int, nbytes: int) -> None:
    """Copies to or from a GPU buffer, in order of the buffer's stream, and waits for the copy."""
    if nbytes > 0:
        check(lib.farandole_copy(on_gpu.device, target, source, nbytes, on_gpu.stream))


def _scaled(x: Array, factor: float, y: Array) -> Array:
    """Returns `x * factor`, written to `y` or, for 16-bit floats, to a new float32 array."""
    x = _widened(x)
    wide = y if y.dtype == x.dtype else np.empty_like(x)
    np.multiply(x, factor, out=wide, casting="same_kind")
    return wide


class _Bytes:
    """Exposes a buffer to NumPy. Arrays over the buffer keep the buffer and its owner alive."""

    def __init__(self, buffer: Buffer, nbytes: int) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (buffer.pointer, False),
        }


def _raw(buffer: Buffer) -> Array:
    """Returns the buffer's memory as a flat array. bfloat16 appears as uint16."""
    dtype = dtype_of(buffer.dtype)
    return np.asarray(_Bytes(buffer, prod(buffer.shape) * dtype.itemsize)).view(dtype)


def _widened(raw: Array) -> Array:
    """Returns the values, converted to float32 if they are 16-bit floats."""
    if raw.dtype == np.uint16:
        bits: Array = raw.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return raw.astype(np.float32) if raw.dtype == np.float16 else raw


def _store(wide: Array, raw: Array) -> None:
    """Writes float32 values to `raw`, rounded to nearest even."""
    if raw.dtype == np.uint16:
        bits = wide.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        raw[:] = np.where(np.isnan(wide), 0x7FC0, rounded)
    else:
        raw[:] = wide
