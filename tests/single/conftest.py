# SPDX-License-Identifier: Apache-2.0
"""For tests in one process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import farandole


@pytest.fixture(scope="module", autouse=True)
def _no_world_is_left() -> Iterator[None]:
    """init() fixes the settings: the next file on this worker has others."""
    yield
    farandole.shutdown()
