# SPDX-License-Identifier: Apache-2.0
"""Loads the C core, libfarandole.so, through cffi. All other modules reach the core through this
module. It may be used from any thread."""

from __future__ import annotations

import os
import zlib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from farandole.errors import from_code

_FOLDER = Path(__file__).resolve().parent / "lib"
_LIBRARY = _FOLDER / "libfarandole.so"
_HEADER = _FOLDER / "farandole.h"
_PARSED = _FOLDER / "abi"  # Python source, which setup.py makes from the header


def _parsed(header: bytes) -> Any:
    """Returns the declarations that setup.py parsed, or None if the header has changed since."""
    loader = SourceFileLoader("_farandole_abi", str(_PARSED))
    module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    try:
        loader.exec_module(module)
    except OSError:
        return None
    return module.ffi if module.header == zlib.crc32(header) else None


def _parse(header: bytes) -> Any:
    import cffi

    ffi = cffi.FFI()
    try:
        ffi.cdef(header.decode())
    except cffi.CDefError as reason:
        raise ValueError(reason) from reason
    return ffi


def _load() -> tuple[Any, Any]:
    """Opens the library. Raises ImportError with the reason and a remedy if this fails."""
    try:
        header = _HEADER.read_bytes()
        ffi = _parsed(header) or _parse(header)
        return ffi, ffi.dlopen(str(_LIBRARY))
    except (OSError, ValueError) as reason:
        raise ImportError(
            f"farandole cannot load its core {_LIBRARY}: {reason}. Remedy: in a checkout run "
            "`make venv` (it builds the core); else install its wheel with --force-reinstall. "
            "The core is built for Linux on x86-64 and aarch64 only."
        ) from reason


ffi: Any
lib: Any
ffi, lib = _load()
os.register_at_fork(after_in_child=lib.farandole_forked)


why_left = ""  # why this rank left the job before shutdown(); set by calls/part.py


def text(pointer: Any) -> str:
    """Decodes a C string."""
    return ffi.string(pointer).decode(errors="replace")  # type: ignore[no-any-return]


def error(code: int, what: str = "") -> Exception:
    """Returns the typed exception for a C error code, with this thread's farandole_error() text.

    `what` describes the call. If the whole job has failed, the text starts with `what`, because the
    core's text does not name a call in that case.
    """
    said = text(lib.farandole_error())
    if why_left and code == lib.FARANDOLE_E_SHUTDOWN:
        said = why_left
    if what and lib.farandole_broken():
        said = f"{what}: {said}"
    reason = from_code(code, said)
    reason._from_core = True  # type: ignore[attr-defined]
    return reason


def is_from_core(reason: Exception) -> bool:
    """True if error() created this exception."""
    return getattr(reason, "_from_core", False)


def check(code: int) -> None:
    """Raises the typed exception unless `code` is FARANDOLE_OK."""
    if code != 0:
        raise error(code)


def check_count(value: int) -> int:
    """Returns `value`. If it is negative, raises the typed exception for code `-value`."""
    if value < 0:
        raise error(-value)
    return value


def read_string(ask: Any) -> str:
    """Calls `ask(buffer, capacity)`, a core function that writes text, and returns the text."""
    room = ffi.new("char[]", 1 << 16)
    return str(ffi.buffer(room, check_count(ask(room, len(room))))[:].decode(errors="replace"))
