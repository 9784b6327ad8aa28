# SPDX-License-Identifier: Apache-2.0
"""--seeds: which schedules run."""

from __future__ import annotations

import pytest

from harness.hosts import why_not
from schedules.schedule import draw


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", default="50", help="schedules to run: so many, or FIRST:LAST")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a seed, named after it."""
    if "seed" in metafunc.fixturenames:
        first, colon, last = metafunc.config.getoption("--seeds").partition(":")
        seeds = range(int(first), int(last) + 1) if colon else range(int(first))
        names = [f"{seed}-{draw(seed).kind.value}" for seed in seeds]
        metafunc.parametrize("seed", seeds, ids=names)


@pytest.fixture(scope="session")
def lacks_hosts() -> str:
    """Why hosts cannot be simulated here; empty: they can."""
    return why_not()
