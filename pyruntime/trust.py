# SPDX-License-Identifier: Apache-2.0
"""Which users and files this process trusts. The core has the rule for users; any thread."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from farandole._library import lib


def is_own_user(user: int) -> bool:
    """True for the user that this process runs as.

    False for the kernel's overflow user (nobody) in a user namespace that does not map every user:
    there it stands for all users that are not mapped.
    """
    return bool(lib.farandole_is_own_user(user))


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most `most` bytes; never waits for a pipe's writer.

    Raises ValueError for any other kind of file and for a larger one, OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_size > most:
            raise ValueError(f"{path} has {found.st_size} bytes; at most {most} are read")
        return file.read(most).decode(errors="replace")
