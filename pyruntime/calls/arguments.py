# SPDX-License-Identifier: Apache-2.0
"""The arguments of the public calls: of each name one row, which says what a value has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from farandole.arrays.kinds import kind_of
from farandole.members import ProcessSet, global_process_set

__all__ = ["ARGUMENTS", "OPTIONS", "Argument", "ReduceOp", "check", "number", "shown", "wrong"]

Fault = type[Exception] | None  # what a wrong value is raised as; None: it is right


class ReduceOp(IntEnum):
    """How values are combined; values of enum farandole_reduce_op."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__  # that of Enum is slow, and calls are looked up by it


class Argument(NamedTuple):
    """One row: what is wanted, as the errors say it, and what is wrong with a value."""

    wants: str
    fault: Callable[[Any], Fault]


_OPS = frozenset(ReduceOp)
_MOST_SECONDS = 1e9
_LARGEST_RANK = 2**31 - 1
_LONGEST_NAME = 4096  # bytes


def wrong(what: str, value: Any, argument: Argument, fault: type[Exception]) -> Exception:
    """The error about a value: `what` names the argument."""
    return fault(f"{what} is {shown(value)}, of type {type(value).__name__}: {argument.wants}")


def shown(value: Any) -> str:
    """The value as an error shows it. Never raises."""
    try:
        text = repr(value)
    except Exception:
        return "a value that has no text"
    return text if len(text) <= 80 else text[:77] + "..."


def _anything(_: Any) -> Fault:
    return None


def _integer(value: Any, least: int, most: int) -> Fault:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return TypeError
    try:
        return None if least <= value.__index__() <= most else ValueError
    except TypeError:  # an array of several
        return TypeError


def number(value: Any) -> float | None:
    """The value of an int, a float, or an array or tensor of one element; None for all else.

    NaN for an int that no float can hold.
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, (str, bytes, bytearray, bool)) or not hasattr(value, "__float__"):
            return None
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        return None
    except OverflowError:
        return math.nan


def _is_factor(value: Any) -> Fault:
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
    return _integer(value, 0, len(_OPS) - 1)


def _is_average(value: Any) -> Fault:
    if value is None or isinstance(value, (bool, np.bool_)):
        return None
    return _integer(value, 0, 1)


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
    return _integer(value, 0, _LARGEST_RANK)


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


def _is_share(value: Any) -> Fault:
    return None if value is None else _is_factor(value)


def _is_passes(value: Any) -> Fault:
    if number(value) is not None and not hasattr(value, "__index__"):
        return ValueError
    return _integer(value, 1, _LARGEST_RANK)


def _is_divisor(value: Any) -> Fault:
    as_float = number(value)
    if as_float is None:
        return TypeError
    return None if math.isfinite(as_float) and as_float != 0 else ValueError


_ANY = Argument("anything", _anything)
_ARRAYS = Argument(
    "pass a list of arrays, in the same order on all ranks; for one array leave `grouped_` out",
    _is_list,
)
_FACTOR = Argument("pass a number that is not NaN", _is_factor)

# By the names of the parameters. Who adds a call with a new one adds a row.
ARGUMENTS: dict[str, Argument] = {
    "tensor": _ANY,  # its kind and dtype are looked at where its memory is
    "tensors": _ARRAYS,
    "op": Argument(
        "pass one of Average, Sum, Adasum, Min, Max and Product of farandole, or leave it out",
        _is_op,
    ),
    "average": Argument("pass True or False, or op= in its place", _is_average),
    "prescale_factor": _FACTOR,
    "postscale_factor": _FACTOR,
    "compression": Argument(
        "pass Compression.none, fp16 or bf16, or a class with compress and decompress",
        _is_compression,
    ),
    "root_rank": Argument("pass a rank of the world, an int from 0 to size() - 1", _is_root),
    "splits": _ANY,  # read where they are used
    "name": Argument(
        "pass a text of 1 to 4096 bytes without null characters, the same on all ranks, or None",
        _is_name,
    ),
    "process_set": Argument(
        "pass the ProcessSet that add_process_set gave on every rank (it is not registered, or "
        "no longer, if it has no number), or leave it out",
        _is_process_set,
    ),
    "timeout": Argument("pass seconds from 0 to 1e9, or None for no limit", _is_timeout),
    "density_threshold": Argument("pass a share from 0 to 1, or None", _is_share),
    "device": _ANY,
    "obj": _ANY,
    "model": _ANY,
    "grads": _ANY,
    "params": _ANY,
    "optimizer": _ANY,
}

# Those of objects that make calls later: nobody waits for them yet.
OPTIONS: dict[str, Argument] = {
    "op": Argument(
        "pass one of Average, Sum, Adasum, Min, Max and Product of farandole",
        lambda value: TypeError if value is None else _is_op(value),
    ),
    "process_set": ARGUMENTS["process_set"],
    "backward_passes_per_step": Argument("pass an int, 1 at least", _is_passes),
    "gradient_predivide_factor": Argument("pass a finite number other than 0", _is_divisor),
}


def check(**values: Any) -> None:
    """Raises what is wrong with the first wrong one of these options, by their names."""
    for name, value in values.items():
        fault = OPTIONS[name].fault(value)
        if fault is not None:
            raise wrong(name, value, OPTIONS[name], fault)
