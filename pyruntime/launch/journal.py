# SPDX-License-Identifier: Apache-2.0
"""The journal of an elastic job: one file in its folder. By it the next supervisor goes on, and
agents find the present one. For supervisors and agents, on any thread."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farandole.commits import newest_commit
from farandole.errors import CheckpointError
from farandole.launch.disk import Disk
from farandole.membership.journal import Journal, Record, Unready
from farandole.membership.words import Commit, World, decode, encode
from farandole.start.session import SECRET_BYTES
from farandole.trust import Folder, make_folder, open_lock, read_file, replace_file

_FILE, _NEW, _LOCK = "job.json", "job.new", "job.lock"
_PATIENCE = 5.0  # seconds for a disk that fails when the job begins, and when it ends


class FileJournal(Journal):
    """Raises CheckpointError where the folder is not the user's own alone; take() OSError, if the
    disk fails at the start."""

    def __init__(
        self,
        folder: Path,
        address: str,
        key: str,
        tell: Callable[[str], object],
        wake: Callable[[], object],
    ) -> None:
        """`address`, `key`: by which agents reach this supervisor. `tell`, `wake`: as for Disk."""
        self._folder = Folder(folder)
        self._contact = {"address": address, "key": key, "secret": secrets.token_hex(SECRET_BYTES)}
        self._term = 0  # the newest that was seen
        self._disk = Disk(folder, tell, wake)

    def take(self) -> Record:
        """Starts the next term; from now on write() fails for all earlier ones."""
        record = self._disk.insist(self._take, _PATIENCE)
        self._term = record.term
        return record

    def _take(self) -> Record:
        make_folder(self._folder.path)
        with self._locked() as place:
            found = _read(place)
            record = _record_of(found)
            if found.get("closed", True):  # nobody lives: only the numbers must go on
                record = Record(record.term, World(record.world.number))
            elif "secret" in found:  # the ranks go on, with the keys that follow from it
                self._contact["secret"] = found["secret"]
            record = record._replace(term=record.term + 1)
            self._write(place, record)
            return record

    def write(self, record: Record) -> bool:
        """Writes unless a later term has started; returns whether it has written."""

        def write() -> bool:
            with self._locked() as place:
                ours = _record_of(_read(place)).term <= record.term
                if ours:
                    self._write(place, record)
                return ours

        return self._disk.ask("write", record, write)

    def term(self) -> int:
        """The newest term that was seen in the folder; looks again."""
        with contextlib.suppress(Unready):
            self._term = self._disk.ask("term", None, self._newest_term, quiet=True)
        return self._term

    def _newest_term(self) -> int:
        with self._folder.opened() as place:
            return _record_of(_read(place)).term

    def commit(self) -> Commit:
        """The newest commit in the folder."""

        def newest() -> Commit:
            found = newest_commit(self._folder.path)
            with self._folder.opened():  # else it was exchanged: what was found says nothing
                return found

        return self._disk.ask("commit", None, newest)

    def close(self) -> None:
        """Notes that no process of the job lives: the next term need not wait for any."""

        def close() -> None:
            with self._locked() as place:
                self._write(place, _record_of(_read(place)), closed=True)

        with contextlib.suppress(OSError):
            self._disk.insist(close, _PATIENCE)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """A context in which no other supervisor writes; its value is the folder's descriptor."""
        with self._folder.opened() as place:
            lock = open_lock(place, _LOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield place
            finally:
                os.close(lock)

    def _write(self, place: int, record: Record, closed: bool = False) -> None:
        text = json.dumps({**self._contact, "record": encode(record), "closed": closed})
        replace_file(place, _FILE, _NEW, [text.encode()])


def contact(folder: Path | Folder) -> tuple[str, str, str] | None:
    """Address and key of the job's supervisor, and the secret from which its ranks derive keys;
    None: the job has ended, or not started. Raises CheckpointError if others may write to the
    folder."""
    try:
        with (Folder(folder) if isinstance(folder, Path) else folder).opened() as place:
            found = _read(place)
    except FileNotFoundError:
        return None
    if found.get("closed", True):
        return None
    return found["address"], found["key"], found.get("secret", "")


def _read(place: int) -> dict[str, Any]:
    try:
        found = json.loads(read_file(place, _FILE))
        if not isinstance(found, dict):
            raise ValueError("no document")
        _record_of(found)
        return found
    except FileNotFoundError:
        return {}
    except ValueError as reason:
        raise CheckpointError(
            f"{_FILE} is damaged: {reason}; remedy: choose a different folder"
        ) from reason


def _record_of(found: dict[str, Any]) -> Record:
    return decode(Record, found["record"]) if "record" in found else Record()
