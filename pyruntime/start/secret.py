# SPDX-License-Identifier: Apache-2.0
"""The secret that the ranks of a job know from outside, and how they use it where strangers read
and write what they tell each other: in torch's store. For the bootstrap."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from farandole.config import setting, usual_file
from farandole.errors import LibraryError

SECRET, SECRET_FILE = "FARANDOLE_JOB_SECRET", "FARANDOLE_JOB_SECRET_FILE"
_FILE = "job-secret"  # if no variable names one
_LEAST = 16  # characters
_MOST = 4096  # bytes of a file
_TAG = 32  # bytes


def job_secret() -> bytes:
    """The secret, from the environment or a file of this user; b"" if there is none.

    Raises LibraryError, with the remedy, if it is too short, or if others can read the file.
    """
    if text := os.environ.get(SECRET, ""):
        return _long_enough(text.encode(), SECRET)
    named = setting(SECRET_FILE)
    if named == "none":
        return b""
    path = Path(os.path.expanduser(named)) if named else usual_file(_FILE)  # noqa: PTH111
    if path is None:
        return b""
    try:
        return _long_enough(_read(path), str(path))
    except FileNotFoundError as reason:
        if not named:
            return b""
        raise LibraryError(f"{SECRET_FILE}={named} is not there: {remedy()}") from reason
    except OSError as reason:
        raise LibraryError(f"the job's secret in {path} can't be read: {reason}") from reason


def remedy() -> str:
    """How to give a job a secret, for errors."""
    path, where = usual_file(_FILE), f"that {SECRET_FILE} names"
    if path is not None:
        where = (
            f"`(umask 077; mkdir -p {path.parent} && openssl rand -hex 32 > {path})`, which a "
            "shared home folder brings to all"
        )
    return (
        f"remedy: the same secret on every host, in a file {where}, or in {SECRET}; or start with "
        "mpirun; or, if nobody but the job reaches this network, FARANDOLE_TRUST_NETWORK=1"
    )


def _read(path: Path) -> bytes:
    # Neither a pipe that nobody writes to nor a terminal is waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise PermissionError("it is not a regular file")
        if about.st_uid != os.geteuid():
            raise PermissionError(f"it belongs to user {about.st_uid}, not to this one")
        if about.st_mode & 0o077:
            raise PermissionError(f"others may use it too; remedy: chmod 600 {path}")
        return os.read(descriptor, _MOST).strip()
    finally:
        os.close(descriptor)


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST:
        raise LibraryError(
            f"{where} has {len(secret)} characters, which a stranger could guess: at least {_LEAST}"
            " are needed; remedy: openssl rand -hex 32"
        )
    return secret


class Seal:
    """Hides what the ranks of one meeting tell each other, and shows when it was changed."""

    def __init__(self, secret: bytes, meeting: bytes) -> None:
        """`meeting`: what the meeting is. Each rank has put a random number into it, so the seals
        of another meeting are of no use in this one."""
        self._key = hmac.digest(secret, b"farandole meeting 1\n" + meeting, "sha256")

    def close(self, place: str, data: bytes) -> bytes:
        """`data`, sealed for a place, at which nothing else is ever sealed."""
        hidden = self._turned(place, data)
        return hidden + self._tag(place, hidden)

    def open(self, place: str, sealed: bytes) -> bytes:
        """The inverse of close(). Raises ValueError unless one who knows the secret has sealed it,
        for this place and in this meeting."""
        hidden = sealed[:-_TAG]
        if not hmac.compare_digest(self._tag(place, hidden), sealed[-_TAG:]):
            raise ValueError("the seal is broken")
        return self._turned(place, hidden)

    def _tag(self, place: str, hidden: bytes) -> bytes:
        key = hmac.digest(self._key, f"prove {place}".encode(), "sha256")
        return hmac.digest(key, hidden, "sha256")

    def _turned(self, place: str, data: bytes) -> bytes:
        """Covers data with the key stream of `place`; a second call uncovers it."""
        key = hmac.digest(self._key, f"hide {place}".encode(), "sha256")
        stream = hashlib.shake_256(key).digest(len(data))
        mixed = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
        return mixed.to_bytes(len(data), "little")
