# SPDX-License-Identifier: Apache-2.0
"""The folder for the commits of an elastic job, as its supervisor uses it. A thread reads there: a
disk may hang, and agents end the ranks of a supervisor that is silent."""

from __future__ import annotations

import fcntl
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
    """The folder of one job. All methods are called by the supervisor's thread."""

    def __init__(
        self, folder: Folder, say: Callable[[str], object], wake: Callable[[], object]
    ) -> None:
        """Makes the folder, and keeps other supervisors out of it as long as this process lives.

        `say` reports that the disk fails, once, and that it works again. `wake` is called on
        another thread when newest_commit() has an answer. Raises CheckpointError where the folder
        is not the user's own alone, or another supervisor has it; OSError.
        """
        self._folder, self._say, self._wake = folder, say, wake
        self._asked: Future[Commit] | None = None
        self._since = 0.0  # when the disk was asked
        self._fails = False  # and that has been reported
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
        except OSError:
            pass  # this file system has no locks

    def newest_commit(self) -> Commit:
        """Raises NotReady until the disk has answered: ask again. Raises CheckpointError for a
        damaged commit, and for a folder that another user has exchanged."""
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
                with self._folder.opened():  # else it was exchanged: what was found says nothing
                    answer.set_result(found)
            except Exception as reason:
                answer.set_exception(reason)
            self._wake()

        threading.Thread(target=read, name="disk", daemon=True).start()
        return answer

    def _report(self, error: str) -> None:
        if error and not self._fails:
            self._say(f"the disk fails: {error}; farandole tries again")
        elif self._fails and not error:
            self._say(f"the disk works again ({self._folder.path})")
        self._fails = bool(error)
