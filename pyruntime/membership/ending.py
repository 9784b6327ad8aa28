# SPDX-License-Identifier: Apache-2.0
"""Why an elastic job ends, and whether it has succeeded. Used by Scheduler only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ending:
    """Reasons so far. The first failure counts."""

    leaves: bool = False  # all ranks must end after their next commit
    well: bool = False  # a process has succeeded; no process is started in its place
    lost_late: bool = False  # a process was lost after another one had succeeded
    failure: str = ""  # why all processes are killed
    code: int = 1  # exit code of the job if it fails: the program's own

    def leave(self) -> None:
        """Asks all ranks to end after their next commit."""
        self.leaves = True

    def fail(self, reason: str, code: int = 1) -> None:
        """Makes the job fail with this reason. All processes are killed."""
        if not self.failure:
            self.failure, self.code = reason, code

    def lose(self) -> None:
        """Notes that a process was lost."""
        self.lost_late |= self.well and not self.leaves

    @property
    def begun(self) -> bool:
        """True if no more processes are started."""
        return bool(self.failure) or self.leaves or self.well

    @property
    def outcome(self) -> str:
        """Result once no process lives: "" for success, else the reason."""
        late = "a process was lost after others had succeeded"
        return self.failure or (late if self.lost_late else "")
