# SPDX-License-Identifier: Apache-2.0
"""Ranks that run one program after another, and what is wrong with what they say."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from farandole.start.rendezvous import RendezvousServer
from harness.process import Process, check_no_residue
from strangers.loops import Loop
from strangers.program import Program
from strangers.verdict import Crashed, Failure, Hung, Raised, judge

__all__ = ["World"]

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 20.0  # one program, on a machine that is busy
_GRACE = 2.0  # for the other ranks, once one has failed
_LOG = 20_000  # characters of a rank's output that a report shows

# glibc fills what is freed, and gives memory of some pages back to the system at once, so that
# whoever uses it later is seen.
MALLOC = {"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "16384"}
LIMITS = {"FARANDOLE_TUNING": "none", "FARANDOLE_STALL_ABORT": "8", "FARANDOLE_STALL_WARN": "4"}


class World:
    """`ranks` processes; a context manager. They live until a program fails in them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.starts = 0  # of ranks
        self._folder = tempfile.TemporaryDirectory(prefix="strangers-")
        address = str(Path(self._folder.name) / "home")
        self._listener = Listener(address, "AF_UNIX")
        paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(":")]
        env = {**MALLOC, **LIMITS, "PYTHONPATH": ":".join(filter(None, paths))}
        env["OMP_NUM_THREADS"] = "1"
        self._zygote = Process([sys.executable, "-m", "strangers.zygote", address], env)
        self._home = self._accept()[1]
        self._server: RendezvousServer | None = None
        self._pids: dict[int, int] = {}  # by rank
        self._lines: list[Connection] = []

    def run(self, program: Program | Loop) -> None:
        """Raises a Failure that says what is wrong. The next program then gets new ranks."""
        if not self._lines:
            self._start()
        try:
            for line in self._lines:
                line.send(program)
            judge(program, self._answers())
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the ranks; run() starts new ones."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._ask("ended", pid)
        for line in self._lines:
            line.close()
        self._pids, self._lines = {}, []
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._home.close()
        self._listener.close()
        self._zygote.kill()
        self._folder.cleanup()
        check_no_residue({self._zygote.pid})

    # ---- ranks

    def _accept(self) -> tuple[Any, Connection]:
        """The next process that connects, and who it says that it is."""
        listener: Any = self._listener
        listener._listener._socket.settimeout(SECONDS * 2)
        try:
            line = self._listener.accept()
            return line.recv(), line
        except (OSError, EOFError) as reason:
            text = f"{self._zygote.output}\n{self._logs()}"
            raise Crashed(f"a process did not start ({reason}):\n{text}") from reason

    def _ask(self, *question: Any) -> Any:
        self._home.send(question)
        return self._home.recv()

    def _start(self) -> None:
        self.starts += 1
        folder = Path(self._folder.name) / str(self.starts)
        folder.mkdir()
        self._server = RendezvousServer(self.ranks)
        environments = [self._server.environment(rank) for rank in range(self.ranks)]
        self._pids = dict(enumerate(self._ask("world", environments, str(folder))))
        lines = dict(self._accept() for _ in range(self.ranks))
        self._lines = [lines[rank] for rank in range(self.ranks)]

    def _answers(self) -> list[Any]:
        """What each rank found; Crashed, Raised or Hung where one does not come to its end."""
        answers: list[Any] = [None] * self.ranks
        waiting = dict(enumerate(self._lines))
        end = time.monotonic() + SECONDS
        failure: Failure | None = None
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, end - time.monotonic()))
            if not ready:
                if failure is not None:
                    break
                raise Hung(f"ranks {list(waiting)} hung for {SECONDS:g} s\n{self._stacks(waiting)}")
            for rank, line in list(waiting.items()):
                if line not in ready:
                    continue
                del waiting[rank]
                wrong = self._receive(rank, line, answers)
                # A crash explains the errors of others.
                if wrong is not None and (failure is None or isinstance(wrong, Crashed)):
                    failure = wrong
                    end = min(end, time.monotonic() + _GRACE)
        if failure is not None:
            raise type(failure)(f"{failure}\n{self._logs()}")
        return answers

    def _receive(self, rank: int, line: Connection, answers: list[Any]) -> Failure | None:
        try:
            word, *rest = line.recv()
        except (EOFError, OSError):
            code = self._ask("ended", self._pids.pop(rank))
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Crashed(f"rank {rank} ended by {how}")
        if word == "done":
            answers[rank] = rest[0]
            return None
        doing, text, found = rest
        wrong = [what for what in found if what[0] == "wrong"]
        return Raised(f"rank {rank} at instruction {doing}:\n{text}{wrong or ''}", text)

    # ---- reports

    def _stacks(self, ranks: Any) -> str:
        """All logs, with Python's stacks of these ranks at their ends."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while time.monotonic() < end and self._logs().count("most recent call first") < len(ranks):
            time.sleep(0.01)  # nobody tells when faulthandler has written
        return self._logs()

    def _logs(self) -> str:
        folder = Path(self._folder.name) / str(self.starts)
        parts = []
        for rank in range(self.ranks):
            path = folder / f"rank-{rank}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            parts.append(f"--- output of rank {rank}\n{text[-_LOG:]}")
        return "\n".join(parts)
