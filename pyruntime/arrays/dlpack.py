# SPDX-License-Identifier: Apache-2.0
"""Reads and creates the DLPack capsules that cuda_array.py needs; dlpack.h defines them. A consumer
may free a capsule on any thread."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

CUDA = 2  # kDLCUDA
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLDataTypeCode
_CODES = {name: code for code, name in _KINDS.items()}
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# These prototypes are separate objects because other code may reset the attributes of
# ctypes.pythonapi at any time.
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_get = ("PyCapsule_GetPointer", ctypes.pythonapi)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(_get)
# Takes the capsule's address, because a reference would revive a capsule that is being destroyed.
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(_get)
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

# Memory that consumers of farandole's capsules still use, keyed by the DLPack structure's address.
_lent: dict[int, tuple[object, ...]] = {}


class CapsuleInfo(NamedTuple):
    """An array that a capsule describes.

    `pointer` is 0 if there is no memory. `strides` count elements; None means C-contiguous.
    """

    pointer: int
    device: tuple[int, int]  # (type, ordinal)
    dtype: str  # NumPy's name, or bfloat16
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def read(made: Any) -> CapsuleInfo:
    """Reads a capsule without consuming it. Keep the capsule as long as you use its memory.

    Raises TypeError for a vector type or an unknown type code.
    """
    x = ctypes.cast(_pointer(made, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    kind = _KINDS.get(x.code)
    if kind is None or x.lanes != 1:
        raise TypeError(f"DLPack type (code {x.code}, {x.bits} bits, {x.lanes} lanes) is unknown")
    dtype = kind if kind == "bool" else f"{kind}{x.bits}"
    strides = tuple(x.strides[: x.ndim]) if x.strides else None
    pointer = x.data + x.byte_offset if x.data else 0
    return CapsuleInfo(
        pointer, (x.device_type, x.device_id), dtype, tuple(x.shape[: x.ndim]), strides
    )


def capsule(
    pointer: int, device: tuple[int, int], dtype: str, shape: tuple[int, ...], owner: object
) -> Any:
    """Returns a capsule over contiguous memory, which `owner` keeps alive while it is in use."""
    kind = dtype.rstrip("0123456789")
    bits = 8 if kind == "bool" else int(dtype[len(kind) :])
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    tensor = _Tensor(pointer, *device, len(shape), _CODES[kind], bits, 1, sizes, None, 0)
    managed = _Managed(tensor, None, ctypes.cast(_deleter, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _lent[address] = (managed, sizes, owner)
    return _new(address, _NAME, _destructor)


def _give_back(address: int) -> None:
    _lent.pop(address, None)


def _forget(made: int) -> None:
    """Destructor for a capsule that was never consumed."""
    if _valid(made, _NAME):
        _lent.pop(_pointer_in(made, _NAME), None)


_deleter, _destructor = _Deleter(_give_back), _Destructor(_forget)
