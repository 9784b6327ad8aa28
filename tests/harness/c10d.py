# SPDX-License-Identifier: Apache-2.0
"""For tests of the backend of torch.distributed, in ranks: each test has a world of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import farandole.torch  # noqa: F401 (registers the backend)

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def since(major: int, minor: int) -> pytest.MarkDecorator:
    """Skips a test with an older torch, which lacks what the test is about."""
    reason = f"needs torch {major}.{minor}"
    return pytest.mark.skipif((major, minor) > _VERSION, reason=reason)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    """init_process_group before each test, and its end afterwards."""
    dist.init_process_group("farandole")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
