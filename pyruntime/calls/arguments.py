# SPDX-License-Identifier: Apache-2.0
"""The table of arguments that public calls take. Each argument name has a row that defines which
values are valid. Public calls check their arguments against this table on the caller's thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from farandole._library import lib
from farandole.arrays.kinds import kind_of
from farandole.members import ProcessSet, global_process_set, size_of

Fault = type[Exception] | None  # the error to raise for a wrong value, or None for a valid one


class ReduceOp(IntEnum):
    """Combines the ranks' values element by element, in rank order.

    Average divides the sum by the number of ranks; for integers, the quotient is truncated. Sum
    adds 16-bit and 8-bit floats in float32 and rounds them once. Min and Max return the least and
    the greatest value and propagate NaNs. Product multiplies. Adasum takes only floats; it adds
    orthogonal components and averages parallel ones (Maleki et al., 2020).
    """

    AVERAGE = lib.FARANDOLE_AVERAGE
    SUM = lib.FARANDOLE_SUM
    ADASUM = lib.FARANDOLE_ADASUM
    MIN = lib.FARANDOLE_MIN
    MAX = lib.FARANDOLE_MAX
    PRODUCT = lib.FARANDOLE_PRODUCT

    __hash__ = int.__hash__  # Enum's __hash__ is slow, and call look-ups need it

    def __repr__(self) -> str:  # the form that help() shows
        return f"farandole.{self.name.title()}"


def divisor_of(op: int, process_set: int) -> int:
    """Returns the divisor of a reduction. For Average, this is the set's full size, including ranks
    that called join(). Otherwise it is 1."""
    return size_of(process_set) if op == ReduceOp.AVERAGE else 1


class Argument(NamedTuple):
    """A row of the table. `wants` is advice for error texts. `fault` returns the type of the error
    for a wrong value, or None for a valid one."""

    wants: str
    fault: Callable[[Any], Fault]


_OPS = frozenset(ReduceOp)
_MOST_SECONDS = 1e9
_LARGEST_RANK = 2**31 - 1
_LONGEST_NAME = 4096  # bytes


def wrong(what: str, value: Any, argument: Argument, fault: type[Exception]) -> Exception:
    """Creates the error for a wrong value. `what` names the argument."""
    return fault(f"{what} is {shown(value)}, of type {type(value).__name__}: {argument.wants}")


def shown(value: Any) -> str:
    """Returns the text that shows a value in an error. Never raises."""
    try:
        text = repr(value)
    except Exception:
        return "a value whose repr() failed"
    return text if len(text) <= 80 else text[:77] + "..."


def integer(value: Any, least: int, most: int = _LARGEST_RANK) -> Fault:
    """Returns the error type for a value that is not an int in this range, or None if it is."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return TypeError
    try:
        return None if least <= value.__index__() <= most else ValueError
    except TypeError:  # an array with more than one element
        return TypeError


def number(value: Any) -> float | None:
    """Converts an int, a float, or an array or tensor of one element to a float. Returns None for
    other values, and NaN for an int that is too large for a float.
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, (str, bytes, bytearray, bool)) or not hasattr(value, "__float__"):
            return None
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array with more than one element
        return None
    except OverflowError:
        return math.nan


def is_factor(value: Any) -> Fault:
    """Returns the error type for a value that is NaN or not a number, or None if it is valid."""
    if type(value) is float and value == value:
        return None
    as_float = number(value)
    if as_float is None:
        return TypeError
    return ValueError if math.isnan(as_float) else None


def _is_timeout(value: Any) -> Fault:
    if value is None:
        return None
    seconds = number(value)
    if seconds is None:
        return TypeError
    return None if 0 <= seconds <= _MOST_SECONDS else ValueError


def _is_op(value: Any) -> Fault:
    if value is None or type(value) is ReduceOp:
        return None
    return integer(value, 0, len(_OPS) - 1)


def _is_average(value: Any) -> Fault:
    if value is None or isinstance(value, (bool, np.bool_)):
        return None
    return integer(value, 0, 1)


def _is_name(value: Any) -> Fault:
    if value is None:
        return None
    if not isinstance(value, str):
        return TypeError
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        return ValueError
    return (
        None if encoded and len(encoded) <= _LONGEST_NAME and b"\0" not in encoded else ValueError
    )


def _is_process_set(value: Any) -> Fault:
    if value is global_process_set:
        return None
    if not isinstance(value, ProcessSet):
        return TypeError
    return None if value.process_set_id is not None else ValueError


def _is_root(value: Any) -> Fault:
    return integer(value, 0, _LARGEST_RANK)


def _is_source(value: Any) -> Fault:
    return None if value is None else _is_root(value)


def _is_tag(value: Any) -> Fault:
    return integer(value, 0, 2**63 - 1)


def _is_list(value: Any) -> Fault:
    if type(value) is list or type(value) is tuple:
        return None
    if isinstance(value, (str, Mapping, Set)) or not isinstance(value, Iterable):
        return TypeError
    return TypeError if _is_array(value) is None else None


def _is_array(value: Any) -> Fault:
    try:
        kind_of(value)
    except TypeError:
        return TypeError
    return None


def _is_compression(value: Any) -> Fault:
    both = hasattr(value, "compress") and hasattr(value, "decompress")
    return None if both else TypeError


def _is_passes(value: Any) -> Fault:
    if number(value) is not None and not hasattr(value, "__index__"):
        return ValueError
    return integer(value, 1, _LARGEST_RANK)


def _is_divisor(value: Any) -> Fault:
    as_float = number(value)
    if as_float is None:
        return TypeError
    return None if math.isfinite(as_float) and as_float != 0 else ValueError


_ARRAYS = Argument(
    "pass a list of arrays, in the same order on all ranks; for a single array, call the version "
    "without `grouped_`",
    _is_list,
)
_FACTOR = "pass a number that is not NaN"


_COUNT = Argument("pass an int of at least 1", _is_passes)


# Parameters that are not checked here. They are checked where they are used, or are ignored.
_LATER = (
    "tensor tree splits device device_dense device_sparse ignore_name_scope inplace "
    "keras_model variables obj model grads params optimizer"
)

# The rows, by parameter name. A call with a new parameter needs a new row.
ARGUMENTS: dict[str, Argument] = {
    **dict.fromkeys(_LATER.split(), Argument("", lambda _: None)),
    "tensors": _ARRAYS,
    "op": Argument(
        "pass one of Average, Sum, Adasum, Min, Max and Product of farandole, or leave it out",
        _is_op,
    ),
    "average": Argument("pass True or False, or use op= instead", _is_average),
    "prescale_factor": Argument(_FACTOR, is_factor),
    "postscale_factor": Argument(_FACTOR, is_factor),
    "compression": Argument(
        "pass Compression.none, fp16 or bf16, or a class with compress and decompress",
        _is_compression,
    ),
    "root_rank": Argument("pass a rank of the world, an int from 0 to size() - 1", _is_root),
    "destination": Argument(
        "pass a rank of the process set, an int from 0 to its size() - 1", _is_root
    ),
    "source": Argument(
        "pass a rank of the process set, an int from 0 to its size() - 1, or None for any",
        _is_source,
    ),
    "tag": Argument("pass an int that is not negative, below 2**63", _is_tag),
    "name": Argument(
        "pass a text of 1 to 4096 bytes without null characters, the same on all ranks, or None",
        _is_name,
    ),
    "process_set": Argument(
        "pass the ProcessSet that add_process_set returned on every rank (a set without a number "
        "is not registered), or omit it",
        _is_process_set,
    ),
    "timeout": Argument(
        "pass seconds from 0 to 1e9, or None for no limit",
        _is_timeout,
    ),
}

# Options of constructors. They are checked before the program makes calls, so no peer waits.
OPTIONS: dict[str, Argument] = {
    "op": Argument(
        "pass one of Average, Sum, Adasum, Min, Max and Product of farandole",
        lambda value: TypeError if value is None else _is_op(value),
    ),
    "process_set": ARGUMENTS["process_set"],
    "backward_passes_per_step": _COUNT,
    "every": _COUNT,
    "verify_every": Argument(
        "pass a number of steps, 0 for never", lambda value: integer(value, 0)
    ),
    "gradient_predivide_factor": Argument("pass a finite number other than 0", _is_divisor),
}


def check(rows: Mapping[str, Argument] = OPTIONS, /, **values: Any) -> None:
    """Raises an error for the first invalid option. Pass options as name=value."""
    for name, value in values.items():
        row = rows.get(name) or OPTIONS[name]
        fault = row.fault(value)
        if fault is not None:
            raise wrong(name, value, row, fault)


def factors_of(op: int, divisor: float, process_set: ProcessSet) -> tuple[float, float]:
    """Returns the two factors that gradient_predivide_factor requires: one to apply before the
    reduction and one to apply after it. Raises an error if an argument is invalid."""
    check(op=op, gradient_predivide_factor=divisor, process_set=process_set)
    if divisor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor works with op=Average only: omit one of them")
    whole = number(divisor) or 1.0  # neither None nor 0, as checked above
    return 1.0 / whole, whole


def check_compression(compression: Any) -> None:
    """Raises an error if the compressor is invalid."""
    row = ARGUMENTS["compression"]
    if fault := row.fault(compression):
        raise wrong("compression", compression, row, fault)
