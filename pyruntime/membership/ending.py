# SPDX-License-Identifier: Apache-2.0
"""Records why an elastic job ends and whether it has succeeded. Only Scheduler uses this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ending:
    """The reasons so far for ending the job. If there are several failures, the first one
    counts."""

    leaves: bool = False  # True if all ranks must end after their next commit
    well: bool = False  # True if a process has succeeded; no process replaces it
    lost_late: bool = False  # True if a process was lost after another one had succeeded
    failure: str = ""  # the reason for which all processes are killed, or ""
    code: int = 1  # exit code of a job that fails, taken from its program

    def leave(self) -> None:
        """Asks all ranks to end after their next commit."""
        self.leaves = True

    def fail(self, reason: str, code: int = 1) -> None:
        """Makes the job fail for this reason. All processes will be killed."""
        if not self.failure:
            self.failure, self.code = reason, code

    def lose(self) -> None:
        """Notes that a process was lost."""
        self.lost_late |= self.well and not self.leaves

    @property
    def begun(self) -> bool:
        """True if no more processes shall be started."""
        return bool(self.failure) or self.leaves or self.well

    @property
    def outcome(self) -> str:
        """The job's result once no process is alive: "" for success, or why the job failed."""
        late = "a process was lost after others had succeeded"
        return self.failure or (late if self.lost_late else "")
