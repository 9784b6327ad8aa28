# SPDX-License-Identifier: Apache-2.0
"""The folder for an elastic job's commits. The supervisor uses it.

A separate thread reads the folder. If a hanging disk blocked the supervisor, the agents would kill
their ranks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from farandole.commits import newest_commit
from farandole.errors import CheckpointError, error_text
from farandole.membership.messages import Commit
from farandole.membership.scheduler import NotReady
from farandole.trust import Folder, make_folder, open_lock

_LOCK = "job.lock"
_SLOW = 10.0  # seconds after which a disk that does not answer is reported


class JobFolder:
    """The folder of one job. Used on the supervisor's thread."""

    def __init__(
        self,
        folder: Folder,
        host: str,
        say: Callable[[str], object],
        wake: Callable[[], object],
    ) -> None:
        """Creates the folder, and locks it against other supervisors while this process lives.

        `host` is the name of this host if all ranks run here, else "". The attribute `orphans` is
        set to True if ranks of a killed supervisor may still run on hosts that this supervisor's
        agents do not reach. `say` prints a message when the disk fails, and a message when it works
        again. `wake` is called on another thread once newest_commit() has an answer. Raises
        OSError. Raises CheckpointError if other users may write to the folder or another supervisor
        uses it.
        """
        self._folder, self._say, self._wake = folder, say, wake
        self._asked: Future[Commit] | None = None
        self._since = 0.0  # time when the disk was asked
        self._fails = False  # True if a failure has been reported
        make_folder(folder.path)
        with folder.opened() as place:
            self._lock = open_lock(place, _LOCK)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another `farandole run` uses {folder.path}; remedy: end that job first, or give "
                "a different --checkpoint-dir"
            ) from None
        except OSError as reason:
            say(
                f"cannot lock {folder.path} ({error_text(reason)}): do not use this folder for "
                "another `farandole run` while this one runs"
            )
        running = f"running {host}".encode()
        before = os.pread(self._lock, 1024, 0)
        self.orphans = before != b"" and (before != running or not host)
        os.pwrite(self._lock, running, 0)  # writes before truncating, so a full disk keeps the mark
        os.ftruncate(self._lock, len(running))

    def close(self) -> None:
        """Notes that all processes of this job have ended."""
        with contextlib.suppress(OSError):  # if this fails, the next command merely waits longer
            os.ftruncate(self._lock, 0)

    def newest_commit(self) -> Commit:
        """Returns the newest commit.

        Raises NotReady until the disk has answered. Call again later. Raises CheckpointError if the
        commit is damaged or another user has replaced the folder.
        """
        if self._asked is None:
            self._asked, self._since = self._ask(), time.monotonic()
        if not self._asked.done():
            if time.monotonic() > self._since + _SLOW:
                self._report(f"{self._folder.path} has not answered for {_SLOW:g} s")
            raise NotReady(f"{self._folder.path} has not answered yet")
        asked, self._asked = self._asked, None
        try:
            found = asked.result()
        except OSError as reason:
            self._report(error_text(reason))
            raise NotReady(error_text(reason)) from reason
        self._report("")
        return found

    def _ask(self) -> Future[Commit]:
        answer: Future[Commit] = Future()

        def read() -> None:
            try:
                found = newest_commit(self._folder.path)
                with self._folder.opened():  # raises if the folder was replaced meanwhile
                    answer.set_result(found)
            except Exception as reason:
                answer.set_exception(reason)
            self._wake()

        try:
            threading.Thread(target=read, name="disk", daemon=True).start()
        except RuntimeError as reason:  # no thread is left
            answer.set_exception(OSError(errno.EAGAIN, str(reason)))
        return answer

    def _report(self, error: str) -> None:
        if error and not self._fails:
            self._say(f"the disk fails: {error}; farandole tries again")
        elif self._fails and not error:
            self._say(f"the disk works again ({self._folder.path})")
        self._fails = bool(error)
