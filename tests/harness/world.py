# SPDX-License-Identifier: Apache-2.0
"""One mpirun that runs files of tests one after the other, in ranks that import torch once.

The ranks learn what to run from files.json, run pytest once a file (harness.rank_main), and end
after the first file in which a test has failed. Each file has a folder, in which the ranks leave
what they found, TOLD among it; ENDED is there once all ranks have run it well.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from farandole.start.rendezvous import RendezvousServer
from harness.hosts import simulated_hosts
from harness.mpirun import MpiJob
from harness.process import SLOWNESS, JobError, JobResult

__all__ = ["ENDED", "TOLD", "World"]

TESTS = Path(__file__).resolve().parents[1]
ENDED = "ended"
TOLD = "told.jsonl"  # by rank 0: how each test has ended
START_SECONDS = 120.0 * SLOWNESS  # until all ranks have started MPI and imported what tests need
TEST_SECONDS = 60.0 * SLOWNESS  # one test on all ranks
GRACE_SECONDS = 5.0 * SLOWNESS  # for the other ranks, once one has failed
FILE_SECONDS = 270.0 * SLOWNESS  # a whole file at one size


class World:
    """The running job. `files` are the paths it runs, each with the folder for what it leaves."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[Path, Path],
        ranks: int,
        *,
        hosts: Sequence[int] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        waits: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`waits`: seconds added to what a test may take, and a file."""
        self.files = files
        self._test_seconds = TEST_SECONDS + waits[0] * SLOWNESS
        self._file_seconds = FILE_SECONDS + waits[1] * SLOWNESS
        self._stack = contextlib.ExitStack()
        # A path, because an abstract name is known in one network only, and hosts have their own.
        place = self._stack.enter_context(TemporaryDirectory(prefix="farandole-"))
        self._server = self._stack.enter_context(RendezvousServer(ranks, path=f"{place}/step"))
        (folder / "files.json").write_text(
            json.dumps({str(path): str(there) for path, there in files.items()})
        )
        self._env = {
            "FARANDOLE_TEST_SIZE": str(ranks),
            "FARANDOLE_TEST_FILES": str(folder / "files.json"),
            "FARANDOLE_TEST_STEP": self._server.address,
            "PYTHONPATH": str(TESTS),
            "OMP_NUM_THREADS": "1",  # else ranks of torch compete for the cores
            **(env or {}),
        }
        mpi_args: list[str] = []
        if hosts:
            simulated = self._stack.enter_context(simulated_hosts(folder, hosts))
            mpi_args = simulated.mpi_args()
            self._env |= simulated.environment()
        argv = [sys.executable, "-m", "harness.rank_main", *options]
        self._job = self._stack.enter_context(MpiJob(argv, ranks, self._env, mpi_args))

    def close(self) -> None:
        """Kills what is left of it."""
        self._stack.close()

    def has_run(self, path: Path) -> bool:
        """Whether all ranks have run this file, and no test of it has failed."""
        return (self.files[path] / ENDED).exists()

    def finish(self, path: Path, end: float) -> str:
        """Waits until the ranks have run this file; what went wrong, or nothing.

        The last file's end is the job's. JobError, with all stacks, once time is up: a test may
        take TEST_SECONDS, what comes before the first START_SECONDS, and all that waits for a
        rank that has failed GRACE_SECONDS; `end` bounds it too.
        """
        result = self._watch(path, end)
        if result is None:
            return ""
        if result.returncode == 0:
            self._job.finish(timeout=0)
            return ""
        return f"exit code {result.returncode}\n{self._logs(path, result.out)}"

    def _watch(self, path: Path, end: float) -> JobResult | None:
        """How the job has ended; None: another file follows.

        Ranks that have met again after a failure go on with the next test.
        """
        folder, last = self.files[path], path == list(self.files)[-1]
        now = time.monotonic()
        rounds, failed, wait_for = self._server.rounds, False, "a test takes too long"
        test_deadline = now + (self._test_seconds if rounds else START_SECONDS)
        file_deadline = min(now + self._file_seconds, end)
        while last or not self.has_run(path):
            if result := self._job.process.wait(0.05):
                return result
            now = time.monotonic()
            if self._server.rounds != rounds:
                rounds, test_deadline = self._server.rounds, now + self._test_seconds
                failed, wait_for = False, "a test takes too long"
            if not failed and any(folder.glob(f"failed-{rounds}-*")):
                failed, test_deadline = True, now + GRACE_SECONDS
                wait_for = "a rank failed and the others wait"
            if now > min(test_deadline, file_deadline):
                what = "the file's time is used up" if now > file_deadline else wait_for
                stacks = self._job.stacks()
                self._job.process.kill()
                raise JobError(f"{what}\n{self._logs(path, self._job.process.output)}\n{stacks}")
        return None

    def _logs(self, path: Path, launcher: str) -> str:
        """What the failed ranks tell, then the raw output of all ranks and of mpirun itself."""
        told = sorted(self.files[path].glob("failed-*"))
        parts = [f"=== {path.name}\n{path.read_text(errors='replace')}" for path in told]
        logs = sorted(self.files[path].glob("rank-*.log"))
        parts += [f"--- output of {log.stem}\n{log.read_text(errors='replace')}" for log in logs]
        return "\n".join([*parts, f"--- output of mpirun\n{launcher}"])
