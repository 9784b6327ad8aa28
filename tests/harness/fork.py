# SPDX-License-Identifier: Apache-2.0
"""Ranks without any MPI: N processes and a rendezvous server, for tests in which ranks die."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence

from farandole.start.rendezvous import RendezvousServer
from harness.proc import processes_of_sessions, python_stacks
from harness.process import PATIENCE, SLOWNESS, JobError, JobResult, Process, check_no_residue


class ForkJob:
    """N running ranks; `ranks[i]` is the Process of rank i.

    As a context manager: all are dead when the block is left, however it is left."""

    def __init__(
        self, argv: Sequence[str], ranks: int, env: Mapping[str, str] | None = None
    ) -> None:
        self.server = RendezvousServer(ranks)
        self.ranks = [
            Process(argv, {**(env or {}), **self.server.environment(rank)}) for rank in range(ranks)
        ]

    def __enter__(self) -> ForkJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sessions(self) -> set[int]:
        return {rank.pid for rank in self.ranks}

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send one rank a signal (SIGSTOP and SIGCONT as well)."""
        self.ranks[rank].signal(number)

    def wait_for_output(self, text: str, timeout: float = PATIENCE) -> None:
        """Return when every rank has written `text`."""
        for rank in self.ranks:
            rank.wait_for_output(text, timeout)

    def stacks(self) -> str:
        """Stacks of all Python processes of the job."""
        return python_stacks(processes_of_sessions(self.sessions))

    def finish(self, timeout: float = PATIENCE) -> list[JobResult]:
        """Each rank's result; after `timeout` seconds all die and JobError tells the stacks."""
        deadline = time.monotonic() + timeout * SLOWNESS
        results = [rank.wait(deadline - time.monotonic()) for rank in self.ranks]
        ended = [result for result in results if result is not None]
        if len(ended) < len(results):
            hung = [rank for rank, result in enumerate(results) if result is None]
            stacks = self.stacks()
            self.close()
            raise JobError(f"ranks {hung} hung for {timeout} s\n{self.output()}\n{stacks}")
        check_no_residue(self.sessions)
        return ended

    def output(self) -> str:
        """Everything written so far, rank by rank."""
        return "\n".join(f"--- rank {i}\n{rank.output}" for i, rank in enumerate(self.ranks))

    def close(self) -> None:
        """Kill what lives, close the rendezvous."""
        for rank in self.ranks:
            rank.kill()
        self.server.close()
