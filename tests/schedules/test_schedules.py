# SPDX-License-Identifier: Apache-2.0
"""Each schedule ends with the right numbers, or with errors that say what has happened. A failure
prints the schedule's story, and the command that repeats it."""

from __future__ import annotations

import pytest

from schedules.run import run
from schedules.schedule import draw
from schedules.verdict import complaints


def test_schedule(seed: int, lacks_hosts: str) -> None:
    schedule = draw(seed)
    if schedule.kind.wired and lacks_hosts:
        pytest.skip(lacks_hosts)
    outcome = run(schedule)
    wrong = complaints(schedule, outcome)
    told = f"{schedule}\n\n{outcome.story()}\n\nexit code {outcome.code}"
    print(told)
    if wrong:
        again = f'make test-schedules ARGS="--seeds {seed}:{seed}"'
        listed = "\n".join(f"* {text}" for text in wrong)
        pytest.fail(f"{listed}\n\n{told}\n\n{outcome.out}\n\nAgain: {again}", pytrace=False)
