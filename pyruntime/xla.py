# SPDX-License-Identifier: Apache-2.0
"""Wraps the core's XLA FFI handlers in capsules that JAX can register. Used by adapters, on any
thread."""

from __future__ import annotations

import ctypes
from typing import Any

from farandole._library import ffi, lib

_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def collective_handlers() -> dict[str, Any]:
    """Maps each XLA platform to a capsule that holds its handler's address.

    The capsules are meant for jax.ffi.register_ffi_target().
    """
    names = {"cpu": "farandole_xla_collective", "CUDA": "farandole_xla_collective_on"}
    found = {platform: ffi.addressof(lib, name) for platform, name in names.items()}
    return {key: _capsule(int(ffi.cast("uintptr_t", x)), None, None) for key, x in found.items()}
