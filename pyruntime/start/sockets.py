# SPDX-License-Identifier: Apache-2.0
"""This user's Unix sockets: the folder that contains them, and the removal of their names.

The core chooses the folder, which no other user can enter. Servers and clients use this module on
any thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from pathlib import Path

from farandole._library import lib, read_string


def path_of(name: str = "") -> str:
    """Returns the path of a socket with this name, or with a random name by default.

    The path has at most 64 characters, and no commas, colons or blanks. Raises LibraryError if
    there is no folder for the socket.
    """
    return _folder()[0] + (name or secrets.token_hex(16))


def shared_host() -> str:
    """Returns an identifier that is equal on ranks that can share memory.

    It names the machine's boot and the folder of sockets. Raises LibraryError if there is no
    folder.
    """
    return _folder()[1]


def _folder() -> list[str]:
    return read_string(lib.farandole_sockets).splitlines()


class _Listener(socket.socket):
    """A socket that removes its name when it is closed or the process ends."""

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
    """Creates a Unix socket at `path`. Raises OSError if the name is taken."""
    return _Listener(path)


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:  # a forked child has a copy of the socket
        with contextlib.suppress(OSError):
            Path(path).unlink()
