# SPDX-License-Identifier: Apache-2.0
"""The core's handler of XLA's FFI, as JAX registers it. For adapters, on any thread."""

from __future__ import annotations

import ctypes
from typing import Any

from farandole._library import ffi, lib

_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def collective_handler() -> Any:
    """A capsule with the address of farandole_xla_collective, for jax.ffi.register_ffi_target."""
    address = int(ffi.cast("uintptr_t", ffi.addressof(lib, "farandole_xla_collective")))
    return _capsule(address, None, None)
