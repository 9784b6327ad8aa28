# SPDX-License-Identifier: Apache-2.0
"""Unix sockets of this user: where they lie, and who removes their names. The core chooses the
folder, which no other user can enter. For servers and their callers, on any thread."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from pathlib import Path

from farandole._library import lib, read_string


def path_of(name: str = "") -> str:
    """The path of a socket with this name, by default one at random; at most 64 characters, none of
    them a comma, colon or blank. Raises LibraryError where there is no folder for it."""
    return _folder()[0] + (name or secrets.token_hex(16))


def shared_host() -> str:
    """Equal for ranks that can share memory: the machine's start, and the folder of their sockets.
    Raises LibraryError where there is none."""
    return _folder()[1]


def _folder() -> list[str]:
    return read_string(lib.farandole_sockets).splitlines()


class _Listener(socket.socket):
    """Its name goes with it, or with the process."""

    def __init__(self, path: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.bind(path)
        except OSError:
            super().close()
            raise
        self._remove = weakref.finalize(self, _remove, path, os.getpid())

    def close(self) -> None:
        self._remove()
        super().close()


def listen_at(path: str) -> socket.socket:
    """A Unix socket at `path`. Raises OSError if the name is taken."""
    return _Listener(path)


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:  # not a forked child, which has a copy of the socket
        with contextlib.suppress(OSError):
            Path(path).unlink()
