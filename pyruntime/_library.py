# SPDX-License-Identifier: Apache-2.0
"""The door to the C core: libfarandole.so, read through cffi by its own header."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cffi

from farandole.errors import from_code

_FOLDER = Path(__file__).resolve().parent / "lib"
_LIBRARY = _FOLDER / "libfarandole.so"
_HEADER = _FOLDER / "farandole.h"


def _load() -> tuple[Any, Any]:
    """Opens the library. Raises ImportError with the reason and the remedy, never half loaded."""
    ffi = cffi.FFI()
    try:
        ffi.cdef(_HEADER.read_text())
        return ffi, ffi.dlopen(str(_LIBRARY))
    except (OSError, cffi.CDefError) as reason:
        raise ImportError(
            f"farandole cannot load its core {_LIBRARY}: {reason}. Remedy: in a checkout run "
            "`make venv` (it builds the core); else `pip install --force-reinstall farandole`. "
            "The core is built for Linux on x86-64 and aarch64 only."
        ) from reason


ffi: Any
lib: Any
ffi, lib = _load()
os.register_at_fork(after_in_child=lib.farandole_forked)


def text(pointer: Any) -> str:
    """A Python string from a C string."""
    return ffi.string(pointer).decode(errors="replace")  # type: ignore[no-any-return]


def error(code: int) -> Exception:
    """The typed exception for a C error code, with this thread's farandole_error() text."""
    reason = from_code(code, text(lib.farandole_error()))
    reason._of_core = True  # type: ignore[attr-defined]
    return reason


def is_of_core(reason: Exception) -> bool:
    """Whether error() has made it."""
    return getattr(reason, "_of_core", False)


def check(code: int) -> None:
    """Raises the typed exception unless `code` is FARANDOLE_OK."""
    if code != 0:
        raise error(code)


def check_count(value: int) -> int:
    """`value`, or the typed exception where the core answered -code."""
    if value < 0:
        raise error(-value)
    return value
