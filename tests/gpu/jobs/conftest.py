# SPDX-License-Identifier: Apache-2.0
"""Tests of whole programs on a GPU: they start ranks themselves, for ranks that end badly."""

from __future__ import annotations

import pytest

from harness import gpu

# Without a GPU none is collected: the one line about the other tests of tests/gpu says why.
collect_ignore_glob = ["test_*.py"] if gpu.why_not() else []


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find in their environment which GPUs there are."""
    for name, value in gpu.environment().items():
        monkeypatch.setenv(name, value)
