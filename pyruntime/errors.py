# SPDX-License-Identifier: Apache-2.0
"""The error classes. Each code of the C core is one class; the text comes from the core."""

from __future__ import annotations

__all__ = [
    "FarandoleError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "LibraryError",
    "MismatchError",
    "PeerError",
    "ShutdownError",
    "StallError",
    "from_code",
]


class FarandoleError(RuntimeError):
    """Any failure of the runtime; the classes below say which."""


class MismatchError(FarandoleError):
    """Ranks disagree about one tensor: the text names tensor, ranks and both values."""


class PeerError(FarandoleError):
    """Another rank died or left: the text names the rank and the cause."""


class StallError(FarandoleError):
    """A deadline passed: the text names the tensor and what is missing."""

    under_way = False  # True: a `timeout=` passed; the call goes on and may be waited for again


class ShutdownError(FarandoleError):
    """The runtime is not running: before init(), after shutdown(), or in a forked child."""


class LibraryError(FarandoleError):
    """MPI, NCCL, CUDA or the operating system failed: the text names the call and its answer."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts come or go: not a failure, but the end of this round of elastic training."""

    def __init__(self, skip_sync: bool = False) -> None:
        """`skip_sync`: nobody is new, so nobody needs the others' state."""
        super().__init__("the hosts of the job change")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Never raised: nothing here is built for one version of a framework. Scripts catch it."""

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


def from_code(code: int, text: str) -> Exception:
    """The exception for a C error code; unknown codes become FarandoleError."""
    kind = _CLASSES[code - 1] if 1 <= code <= len(_CLASSES) else FarandoleError
    return kind(text)
