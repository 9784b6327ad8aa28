# SPDX-License-Identifier: Apache-2.0
"""--seeds: which schedules run."""

from __future__ import annotations

import pytest

from harness.hosts import why_not
from harness.seed import SEED
from schedules.schedule import draw

DEFAULT = "50"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", default=DEFAULT, help="schedules to run: so many, or FIRST:LAST")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a seed, named after it."""
    if "seed" in metafunc.fixturenames:
        # The default again: pytest may come here without having asked for options.
        first, colon, last = metafunc.config.getoption("--seeds", DEFAULT).partition(":")
        seeds = range(int(first), int(last) + 1) if colon else range(SEED, SEED + int(first))
        names = [f"{seed}-{draw(seed).kind.value}" for seed in seeds]
        metafunc.parametrize("seed", seeds, ids=names)


@pytest.fixture(scope="session")
def lacks_hosts() -> str:
    """Why hosts cannot be simulated here; empty: they can."""
    return why_not()
