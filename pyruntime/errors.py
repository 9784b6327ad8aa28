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
    """Any failure of the runtime. Subclasses distinguish the kinds of failure."""


class MismatchError(FarandoleError):
    """Ranks disagree about a tensor. The text names the tensor, the ranks and both values."""


class PeerError(FarandoleError):
    """Another rank died or left. The text names the rank and the cause."""


class StallError(FarandoleError):
    """A deadline passed. The text names the tensor and the ranks that are missing."""

    # True if a `timeout=` has passed. The call continues, and you may wait for it again.
    under_way = False


class ShutdownError(FarandoleError):
    """The runtime is not running, as before init(), after shutdown() and in a forked child."""


class LibraryError(FarandoleError):
    """MPI, NCCL, CUDA or the operating system failed. The text names the call and its error."""


class CheckpointError(FarandoleError):
    """A commit of elastic training cannot be written or read. The text names the cause: the commit
    is damaged, is missing, is from a different job, or can be changed by another user."""


# Elastic training restarts after these errors. Others, such as MismatchError, are program bugs.
RETRIED = (PeerError, StallError, LibraryError)


class HostsUpdatedInterrupt(RuntimeError):
    """Ends an attempt of elastic training, without failure, because hosts were added or removed."""

    def __init__(self, skip_sync: bool = False, leaving: bool = False) -> None:
        """`skip_sync` is True if no rank is new, so that no rank needs another rank's state.
        `leaving` is True if every rank ends now; training may continue in other processes."""
        super().__init__("the job's hosts are changing")
        self.skip_sync, self.leaving = skip_sync, leaving


class HorovodVersionMismatchError(ImportError):
    """Exists only for scripts that catch this error. farandole never raises it, because no build
    depends on a framework's version."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed")
        self.name, self.version, self.installed_version = name, version, installed_version


# The classes for FARANDOLE_E_* in farandole.h, in the same order. Code 0 means success.
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
    """Returns a text such as `rank 3` or `ranks 0, 3`."""
    found = sorted(ranks)
    return ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, found))


def counted(number: int, noun: str) -> str:
    """Returns a text such as `1 rank` or `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def error_text(reason: BaseException) -> str:
    """Returns an exception's text, safe to print on a terminal. Omits an OSError's number."""
    text = str(reason)
    if isinstance(reason, OSError) and reason.strerror:
        text = f"{reason.filename}: {reason.strerror}" if reason.filename else reason.strerror
    return printable(text, lines=True)


def printable(text: str, lines: bool = False) -> str:
    """Escapes control characters in a text from another process, so that a terminal can show it.

    Names may contain escape sequences or reorder a line. If `lines`, keeps line ends and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    shown = (c if c in kept or c.isprintable() else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def from_code(code: int, text: str) -> Exception:
    """Returns the exception for the core's error code, or FarandoleError for an unknown code."""
    kind = _CLASSES[code - 1] if 1 <= code <= len(_CLASSES) else FarandoleError
    return kind(printable(text, lines=True))


_NAMED = {kind.__name__: kind for kind in _CLASSES}
_OURS = [name for name, kind in _NAMED.items() if issubclass(kind, FarandoleError)]
# Finds a farandole error inside a framework's error text. The framework may append a traceback or
# details such as " [executable_name='jit_step']". ValueError and TypeError need the prefix
# "farandole.", because other code also raises such errors.
_EMBEDDED = re.compile(
    rf"(?:farandole\.(ValueError|TypeError)|\b({'|'.join(_OURS)})): (.*?)"
    r"(?=\s+Traceback \(|(?: \[\w+='[^'\n]*'\])*\Z)",
    re.DOTALL,
)


@contextlib.contextmanager
def retyped(framework: type[Exception]) -> Iterator[None]:
    """Context manager that extracts and raises the farandole error inside a framework's error."""
    try:
        yield
    except framework as reason:
        found = _EMBEDDED.search(str(reason))
        if not found:
            raise
        raise _NAMED[found[1] or found[2]](found[3]) from reason


def warn(text: str, category: type[Warning]) -> None:
    """Warns about the program's line that called farandole, directly or through a framework."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in _BETWEEN:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = str(frame.f_globals.get("__name__"))
    where = frame.f_code.co_filename, frame.f_lineno, module, registry
    warnings.warn_explicit(text, category, *where)


def without_frames(reason: Exception) -> Exception:
    """Removes traceback frames inside farandole and torch, so that the traceback ends at or near a
    line of the program.

    Keeps all frames if other code has raised the error or if the error is a bug in farandole.
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
# Packages whose frames warn() skips to find the program's line. without_frames() keeps the frames
# of packages that are not in _LIBRARIES, because those packages raise errors themselves.
_BETWEEN = (*_LIBRARIES, "horovod", "importlib", "contextlib", "keras", "tensorflow", "jax")


def _is_library(frame: FrameType) -> bool:
    """True for frames of farandole, and of torch, which calls farandole for the program."""
    return _package_of(frame) in _LIBRARIES


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
