# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin inside each rank: ranks go from test to test in step, and stop together.

After every test the ranks exchange its outcome through the harness (no MPI, none of our runtime).
One that has failed says so in a file first: if the others do not come, the outer pytest soon ends
the job and shows all stacks. Ranks that have met after a failure stop, or go on with --keep-going,
with a runtime that knows nothing of what has failed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from farandole.start.rendezvous import connect, exchange
from harness.world import TOLD

# Longer than any deadline of the outer pytest, which owns them all.
_STEP_SECONDS = 3600.0


@pytest.fixture(autouse=True)
def runtime() -> Iterator[None]:
    """For conftest: each test finds the runtime up, and leaves no sleeper that only its safety
    timeout woke."""
    import farandole

    farandole.init()
    yield
    assert farandole.metrics()["rescued_wakeups"] == 0


class Step:
    """This rank's seat: where it writes, and how it meets the others."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
        self.size = int(os.environ["FARANDOLE_TEST_SIZE"])
        self.folder = Path()  # of the file that is run now
        self._meetings = 0  # as the outer pytest's server counts them: RendezvousServer.rounds
        self._connection = connect(os.environ["FARANDOLE_TEST_STEP"], self.rank)

    def enter(self, folder: Path) -> None:
        """The next file's folder, in which this rank's output goes to a log of its own."""
        self.folder = folder
        os.environ["FARANDOLE_TEST_FOLDER"] = str(folder)
        log = os.open(folder / f"rank-{self.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def meet(self, text: str) -> list[str]:
        """All ranks' texts, once all have called."""
        answers = exchange(self._connection, text.encode(), _STEP_SECONDS)
        self._meetings += 1
        return [answer.decode() for answer in answers]

    def tell_failure(self, text: str) -> None:
        """Tell the outer pytest why, and that somebody may wait for this rank in vain. The file's
        name holds the meeting that follows, so that nobody mistakes it for a later failure."""
        with (self.folder / f"failed-{self._meetings}-{self.rank}").open("a") as file:
            file.write(text + "\n")


class InStep:
    """Registered by rank_main."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._keep_going = "FARANDOLE_TEST_KEEP_GOING" in os.environ
        self._failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Drop the tests whose `ranks` marker leaves out this world size, and what is done."""
        path = self.step.folder / "done.json"
        done = json.loads(path.read_text()) if path.exists() else []
        wanted = [item for item in items if self._wanted(item) and _name(item.nodeid) not in done]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted
        if self.step.rank == 0:
            names = [_name(item.nodeid) for item in wanted]
            (self.step.folder / "wanted.json").write_text(json.dumps(names))

    def pytest_collection_finish(self) -> None:
        """All of torch, which stays, would make each gc.collect() slow."""
        gc.freeze()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """An import error, for example."""
        if report.failed:
            self.step.tell_failure(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Failures are told at once; the session's end may never come."""
        if report.failed:
            self._failed = True
            captured = "".join(f"--- {name}\n{text}\n" for name, text in report.sections)
            self.step.tell_failure(f"{report.nodeid}\n{report.longreprtext}\n{captured}")
        elif report.skipped:
            reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected failure"
            )
            reason = reason.removeprefix("Skipped: ")
            self._note(report.nodeid, "skipped", report.duration, reason)
        elif report.when == "call":
            self._note(report.nodeid, "passed", report.duration)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run the test, then wait for all ranks to have run it."""
        self._failed = False
        self._note(item.nodeid, "failed", 0.0, "did not end")  # until it does
        result = yield
        outcome = "failed" if self._failed else "passed"
        answers = self.step.meet(f"{outcome} {item.nodeid}")
        failed = [rank for rank, text in enumerate(answers) if text.startswith("failed")]
        if failed:
            self._note(item.nodeid, "failed", 0.0, f"on ranks {failed}")
        if len({text.partition(" ")[2] for text in answers}) > 1:
            item.session.shouldfail = f"ranks run different tests: {answers}"
        elif failed and not self._keep_going:
            item.session.shouldfail = f"{item.name} failed on ranks {failed}"
        elif failed:
            _begin_anew()
        return result

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A session that found nothing to run is no failure."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.step.tell_failure(f"pytest's exit code is {exitstatus}")

    def _note(self, nodeid: str, outcome: str, seconds: float, reason: str = "") -> None:
        """For the outer pytest, at once: a job that is killed leaves what it has. The last of a
        test's lines holds."""
        found = {"outcome": outcome, "seconds": round(seconds, 3), "reason": reason}
        if self.step.rank == 0:
            with (self.step.folder / TOLD).open("a") as file:
                file.write(json.dumps({_name(nodeid): found}) + "\n")

    def _wanted(self, item: pytest.Item) -> bool:
        marker = item.get_closest_marker("ranks")
        return marker is None or self.step.size in marker.args


def _name(nodeid: str) -> str:
    """Of a test within its file."""
    return nodeid.rpartition("::")[2]


def _begin_anew() -> None:
    """The next test finds another runtime: this one may be broken."""
    import farandole

    with contextlib.suppress(farandole.FarandoleError):
        farandole.shutdown()
