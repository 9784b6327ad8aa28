# SPDX-License-Identifier: Apache-2.0
"""The end of an elastic job: why it has come, and how well it is. For the Decider."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ending:
    """All of it that is known."""

    leaves: bool = False  # all ranks shall end after their next commit
    well: bool = False  # a process has ended well: no other one is started for it
    lost_late: bool = False  # one was lost when others had ended well
    failure: str = ""  # why all processes are ended
    code: int = 1  # of the exit, if the job has failed: the program's own

    def leave(self) -> None:
        """All ranks shall end after their next commit."""
        self.leaves = True

    def fail(self, reason: str, code: int = 1) -> None:
        """Ends all processes, and then the job; the first reason counts."""
        if not self.failure:
            self.failure, self.code = reason, code

    def lose(self) -> None:
        """A process was lost."""
        self.lost_late |= self.well and not self.leaves

    @property
    def begun(self) -> bool:
        """Whether no process is started any more."""
        return bool(self.failure) or self.leaves or self.well

    @property
    def outcome(self) -> str:
        """When no process lives; empty: the job has ended well."""
        late = "a process was lost when others had ended well"
        return self.failure or (late if self.lost_late else "")
