# SPDX-License-Identifier: Apache-2.0
"""The error classes, and helpers for error texts. Each error code of the C core has one class."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from types import FrameType


class FarandoleError(RuntimeError):
    """Any failure of the runtime. Subclasses tell the kind of failure."""


class MismatchError(FarandoleError):
    """Ranks disagree about a tensor. The text names the tensor, the ranks and both values."""


class PeerError(FarandoleError):
    """Another rank died or left. The text names the rank and the cause."""


class StallError(FarandoleError):
    """A deadline passed. The text names the tensor and the ranks that are missing."""

    under_way = False  # True: a `timeout=` passed; the call continues, and you may wait again


class ShutdownError(FarandoleError):
    """The runtime is not running: before init(), after shutdown(), or in a forked child."""


class LibraryError(FarandoleError):
    """MPI, NCCL, CUDA or the operating system failed. The text names the call and its error."""


class CheckpointError(FarandoleError):
    """A commit of elastic training cannot be written or read. The text names the cause: damaged,
    missing, from a different job, or writable by another user."""


# Errors after which elastic training restarts. Others, such as MismatchError, are bugs of the
# program.
RETRIED = (PeerError, StallError, LibraryError)


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed, so the current attempt of elastic training ends. Not a
    failure."""

    def __init__(self, skip_sync: bool = False, leaving: bool = False) -> None:
        """`skip_sync`: no rank is new, so no rank needs the state of another. `leaving`: every rank
        ends here; training may continue in other processes."""
        super().__init__("the job's hosts are changing")
        self.skip_sync, self.leaving = skip_sync, leaving


class HorovodVersionMismatchError(ImportError):
    """Never raised, because no build depends on a framework version. For scripts that catch it."""

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
    """An exception's text, safe to print on a terminal. Omits the number of an OSError."""
    text = str(reason)
    if isinstance(reason, OSError) and reason.strerror:
        text = f"{reason.filename}: {reason.strerror}" if reason.filename else reason.strerror
    return printable(text, lines=True)


def printable(text: str, lines: bool = False) -> str:
    """Escapes control characters in a text from another process, so that a terminal can show it.

    Names may hold escape sequences, or characters that reorder a line. `lines`: keeps line ends.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    shown = (c if c in kept or c.isprintable() else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def from_code(code: int, text: str) -> Exception:
    """The exception for an error code of C; FarandoleError for an unknown code."""
    kind = _CLASSES[code - 1] if 1 <= code <= len(_CLASSES) else FarandoleError
    return kind(printable(text, lines=True))


_NAMED = {kind.__name__: kind for kind in _CLASSES}
_OURS = [name for name, kind in _NAMED.items() if issubclass(kind, FarandoleError)]
# Finds a farandole error inside a framework's error text. The framework may append a traceback or
# details such as " [executable_name='jit_step']". ValueError and TypeError need the prefix
# "farandole.", because other code raises such errors, too.
_EMBEDDED = re.compile(
    rf"(?:farandole\.(ValueError|TypeError)|\b({'|'.join(_OURS)})): (.*?)"
    r"(?=\s+Traceback \(|(?: \[\w+='[^'\n]*'\])*\Z)",
    re.DOTALL,
)


@contextlib.contextmanager
def retyped(framework: type[Exception]) -> Iterator[None]:
    """Context: raises farandole's own error in place of the framework's error that contains it."""
    try:
        yield
    except framework as reason:
        found = _EMBEDDED.search(str(reason))
        if not found:
            raise
        raise _NAMED[found[1] or found[2]](found[3]) from reason


def warn(text: str, category: type[Warning]) -> None:
    """Warns at the program's line that called farandole, directly or through a framework."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in _BETWEEN:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = str(frame.f_globals.get("__name__"))
    where = frame.f_code.co_filename, frame.f_lineno, module, registry
    warnings.warn_explicit(text, category, *where)


def without_frames(reason: Exception) -> Exception:
    """Drops traceback frames inside farandole and torch, so that the traceback ends at or near a
    line of the program.

    Keeps all frames if other code has raised the error, or if the error is a bug of farandole.
    """
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
# Packages whose frames warn() skips to find the program's line. without_frames() keeps frames of
# those that are not in _LIBRARIES, because these packages raise errors themselves.
_BETWEEN = (*_LIBRARIES, "horovod", "importlib", "contextlib", "keras", "tensorflow", "jax")


def _is_library(frame: FrameType) -> bool:
    """True for frames of farandole, and of torch, which calls farandole for the program."""
    return _package_of(frame) in _LIBRARIES


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
