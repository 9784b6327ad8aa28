# SPDX-License-Identifier: Apache-2.0
"""Every test finds the runtime up, and leaves no sleeper that only its safety timeout woke."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    import farandole

    farandole.init()
    yield
    assert farandole.metrics()["rescued_wakeups"] == 0
