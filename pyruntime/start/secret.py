# SPDX-License-Identifier: Apache-2.0
"""The job's secret, which ranks get from the environment or a file, and the derivation of keys.

The secret and the keys are never sent. Both ends derive a key from the secret and from random
numbers that they exchange. The bootstrap and sessions use this.
"""

from __future__ import annotations

import hmac
import os
import struct
from pathlib import Path

from farandole.config import setting, usual_file
from farandole.errors import CheckpointError, LibraryError
from farandole.trust import read_secret

SECRET, SECRET_FILE = "FARANDOLE_JOB_SECRET", "FARANDOLE_JOB_SECRET_FILE"
_FILE = "job-secret"  # default file, in the folder of the user's settings
_LEAST = 16  # smallest number of characters of a secret
_MOST = 4096  # largest size in bytes of a file
_LENGTH = struct.Struct("!Q")


def job_secret() -> bytes:
    """Returns the secret from the environment or a file of this user, or b"" if there is none.

    Raises LibraryError, with a remedy, if the secret is too short or others can read the file.
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
        return _long_enough(read_secret(path, _MOST).strip(), str(path))
    except FileNotFoundError as reason:
        if not named:
            return b""
        raise LibraryError(f"{SECRET_FILE}={named} is not there: {remedy()}") from reason
    except (OSError, CheckpointError) as reason:
        raise LibraryError(f"the job's secret in {path} can't be read: {reason}") from reason


def remedy() -> str:
    """Returns the remedy for error messages: how to give a secret to a job."""
    path, where = usual_file(_FILE), f"that {SECRET_FILE} names"
    if path is not None:
        where = (
            f"made by `(umask 077; mkdir -p {path.parent} && openssl rand -hex 32 > {path})` "
            "(once, in a shared home folder)"
        )
    return (
        f"remedy: set the same secret on every host, in a file {where}, or in {SECRET}; or start "
        "with mpirun; or, if only the job can reach this network, set FARANDOLE_TRUST_NETWORK=1"
    )


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST:
        raise LibraryError(
            f"{where} has {len(secret)} characters, which a stranger could guess: at least {_LEAST}"
            " are needed; remedy: openssl rand -hex 32"
        )
    return secret


def mac(key: bytes, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the parts and their lengths.

    Because of the lengths, the same bytes have a different MAC if they are split differently.
    """
    text = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(key, text, "sha256")
