# SPDX-License-Identifier: Apache-2.0
"""Jobs under `farandole run --elastic`. harness/worlds.py has the program that most of them run."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence

from harness.process import Job

__all__ = ["SupervisedJob", "farandole_run", "story"]


def farandole_run(options: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` under a supervisor."""
    command = [sys.executable, "-m", "farandole", "run", "--elastic"]
    return [*command, *options, "--", *argv]


class SupervisedJob(Job):
    """A running `farandole run --elastic`."""

    def __init__(
        self, options: Sequence[str], argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(farandole_run(options, argv), env or {})


def story(out: str) -> list[str]:
    """The lines of the supervisor, its agents and its ranks, without the host's name."""
    found = re.findall(r"^farandole: (.*)$", out, re.MULTILINE)
    return [line.replace(f" on {socket.gethostname()}", "") for line in found]
