# SPDX-License-Identifier: Apache-2.0
"""in_rank.py MODE (pytest | modules) ARGUMENT...: a client's tests in one rank of a job.

MODE: `group` begins a process group of torch.distributed, `init` farandole alone, `horovod` makes
`import horovod` ours, `as_gloo` and `none` nothing. Each test's outcome goes to
CLIENT_FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

found: dict[str, tuple[str, str]] = {}
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


class Record:
    """A plugin of pytest."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A failure in set-up or tear-down counts too."""
        if report.failed or (report.when == "call" and report.passed) or report.skipped:
            outcome = "skipped" if report.skipped else report.outcome
            text = str(report.longrepr[-1] if report.skipped else report.longrepr or "")
            if found.get(report.nodeid, ("", ""))[0] != "failed":
                found[report.nodeid] = outcome, text

    def pytest_collection_finish(self, session: Any) -> None:
        """Tests that are only to be listed."""
        if session.config.option.collectonly:
            found.update((item.nodeid, ("passed", "")) for item in session.items)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that can't be imported is a failure, one that skips itself is skipped."""
        if not report.passed:
            found[report.nodeid] = report.outcome, str(report.longrepr)


def run_modules(names: list[str]) -> None:
    """Each as a program."""
    for name in names:
        sys.argv[:] = [name]
        try:
            if name.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            found[name] = "passed", ""
        except SystemExit as end:
            found[name] = "failed" if end.code else "passed", f"exit code {end.code}"
        except BaseException:
            found[name] = "failed", traceback.format_exc()


def main() -> None:
    """Runs the tests; the exit code is that of the job, not theirs."""
    mode, runner, *arguments = sys.argv[1:]
    if mode == "horovod":
        from farandole.as_horovod import install

        install()
    elif mode == "group":
        import torch.distributed as dist

        dist.init_process_group("farandole")
    elif mode == "init":
        import farandole

        farandole.init()
    if runner == "pytest":
        import pytest

        sys.argv[:] = ["pytest", *arguments]
        pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[Record()])
    else:
        run_modules(arguments)
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    Path(os.environ["CLIENT_FOLDER"], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
