# SPDX-License-Identifier: Apache-2.0
"""This user's Unix sockets: the folder for them, which the core chooses and no other user can
enter, and the removal of their names. Used by servers and clients, on any thread."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from pathlib import Path

from farandole._library import lib, read_string


def path_of(name: str = "") -> str:
    """Path of a socket with this name (default: a random one). It has at most 64 characters, and no
    commas, colons or blanks. Raises LibraryError if there is no folder for the socket."""
    return _folder()[0] + (name or secrets.token_hex(16))


def shared_host() -> str:
    """An identifier that is equal for ranks that can share memory: it names the machine's boot and
    the folder of sockets. Raises LibraryError if there is no folder."""
    return _folder()[1]


def _folder() -> list[str]:
    return read_string(lib.farandole_sockets).splitlines()


class _Listener(socket.socket):
    """Removes its name when it is closed, or when the process ends."""

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
    """Makes a Unix socket at `path`. Raises OSError if the name is taken."""
    return _Listener(path)


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:  # a forked child has a copy of the socket
        with contextlib.suppress(OSError):
            Path(path).unlink()
