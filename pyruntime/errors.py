# SPDX-License-Identifier: Apache-2.0
"""The error classes, for users and all modules. Each code of the C core is one class; the text
comes from the core."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from types import FrameType


class FarandoleError(RuntimeError):
    """Any failure of the runtime; subclasses tell the kind."""


class MismatchError(FarandoleError):
    """Ranks disagree about one tensor: the text names tensor, ranks and both values."""


class PeerError(FarandoleError):
    """Another rank died or left: the text names the rank and the cause."""


class StallError(FarandoleError):
    """A deadline passed: the text names the tensor and what is missing."""

    under_way = False  # True: a `timeout=` passed; the call continues and may be waited for again


class ShutdownError(FarandoleError):
    """The runtime is not running: before init(), after shutdown(), or in a forked child."""


class LibraryError(FarandoleError):
    """MPI, NCCL, CUDA or the operating system failed: the text names the call and its error."""


class CheckpointError(FarandoleError):
    """A commit of elastic training could not be written, or is damaged, missing or foreign, or
    another user may write to it; the text says which."""


# Errors after which elastic training may go on; not the program's own, such as MismatchError.
RETRIED = (PeerError, StallError, LibraryError)


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed: ends the current attempt of elastic training. No failure."""

    def __init__(self, skip_sync: bool = False, leaving: bool = False) -> None:
        """`skip_sync`: no rank is new, so no rank needs the others' state. `leaving`: all ranks end
        here, and training goes on in other processes or not at all."""
        super().__init__("the hosts of the job change")
        self.skip_sync, self.leaving = skip_sync, leaving


class HorovodVersionMismatchError(ImportError):
    """Never raised: nothing here is built for one framework version. For scripts that catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed")
        self.name, self.version, self.installed_version = name, version, installed_version


# FARANDOLE_E_* of farandole.h, in order; code 0 is success.
_CLASSES: tuple[type[Exception], ...] = (
    FarandoleError,  # INTERNAL = 1
    ValueError,  # ARGUMENT
    TypeError,  # TYPE
    MismatchError,
    PeerError,
    StallError,
    ShutdownError,
    LibraryError,
)


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 3`, for error texts."""
    found = sorted(ranks)
    return ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, found))


def counted(number: int, noun: str) -> str:
    """`1 rank` or `3 ranks`, for texts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def error_text(reason: BaseException) -> str:
    """An exception's text, safe to write to a terminal: an OSError's without its number."""
    text = str(reason)
    if isinstance(reason, OSError) and reason.strerror:
        text = f"{reason.filename}: {reason.strerror}" if reason.filename else reason.strerror
    return printable(text, lines=True)


def printable(text: str, lines: bool = False) -> str:
    """`text` of another process, safe to write to a terminal: control characters are escaped.

    Names may hold escape sequences or characters that reorder a line. `lines`: keep line ends.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    shown = (c if c in kept or c.isprintable() else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def from_code(code: int, text: str) -> Exception:
    """The exception for a C error code; unknown codes become FarandoleError."""
    kind = _CLASSES[code - 1] if 1 <= code <= len(_CLASSES) else FarandoleError
    return kind(printable(text, lines=True))


_NAMED = {kind.__name__: kind for kind in _CLASSES}
_OURS = [name for name, kind in _NAMED.items() if issubclass(kind, FarandoleError)]
# One of them and its text within an error of a framework, which may append a traceback, or what it
# knows of the program: " [executable_name='jit_step']". An error of Python's own classes may be
# another's.
_EMBEDDED = re.compile(
    rf"(?:farandole\.(ValueError|TypeError)|\b({'|'.join(_OURS)})): (.*?)"
    r"(?=\s+Traceback \(|(?: \[\w+='[^'\n]*'\])*\Z)",
    re.DOTALL,
)


@contextlib.contextmanager
def retyped(framework: type[Exception]) -> Iterator[None]:
    """A context that raises farandole's error in place of the framework's error that reports it."""
    try:
        yield
    except framework as reason:
        found = _EMBEDDED.search(str(reason))
        if not found:
            raise
        raise _NAMED[found[1] or found[2]](found[3]) from reason


def warn(text: str, category: type[Warning]) -> None:
    """Warns at the line of the program that has called farandole, or a framework that did."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in _BETWEEN:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = str(frame.f_globals.get("__name__"))
    where = frame.f_code.co_filename, frame.f_lineno, module, registry
    warnings.warn_explicit(text, category, *where)


def without_frames(reason: Exception) -> Exception:
    """The error to raise to the program: its traceback then ends near the program's line. Frames of
    others below farandole's stay, as do all frames of an error that is farandole's own fault."""
    meant = (FarandoleError, TypeError, ValueError, NotImplementedError)
    if not isinstance(reason, meant) or not _is_within_libraries(reason):
        return reason
    cause = reason.__cause__
    if cause is not None and str(cause) in str(reason) and _is_within_libraries(cause):
        reason.__cause__ = None
    return reason.with_traceback(None)


def _is_within_libraries(reason: BaseException) -> bool:
    return all(_is_library(frame) for frame, _ in traceback.walk_tb(reason.__traceback__))


_LIBRARIES = ("farandole", "farandole_autoload", "torch")
# They may stand between a program's line and a warning, but have errors of their own, too.
_BETWEEN = (*_LIBRARIES, "horovod", "importlib", "contextlib", "keras", "tensorflow", "jax")


def _is_library(frame: FrameType) -> bool:
    """True for farandole's frames, and for torch's, which stand between those and the program's."""
    return _package_of(frame) in _LIBRARIES


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
