# SPDX-License-Identifier: Apache-2.0
"""What all tests on simulated hosts need: root, and jobs that are gone when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.hosts import why_not
from harness.hosts_job import Start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need hosts."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    if here and (reason := why_not()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(source, ranks, *arguments): see Start."""
    with ExitStack() as stack:
        yield Start(tmp_path, stack)
