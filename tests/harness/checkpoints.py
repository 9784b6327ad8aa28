# SPDX-License-Identifier: Apache-2.0
"""A folder for the checkpoints of all ranks, a comparison of states bit by bit, and right and wrong
arguments of the calls."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same on all ranks; rank 0 removes it."""
    path = Path(fd.broadcast_object(tempfile.mkdtemp() if fd.rank() == 0 else ""))
    yield path
    fd.barrier()
    if fd.rank() == 0:
        shutil.rmtree(path, ignore_errors=True)


def bits(value: Any) -> Any:
    """Compares by ==, bit by bit; for nested states."""
    if isinstance(value, torch.Tensor):
        flat = value.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    if isinstance(value, dict):
        return {key: bits(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(x) for x in value]
    return value


@functools.cache
def own_folder() -> Path:
    """Of one process alone, so that what one rank passes is not the others'."""
    path = Path(tempfile.gettempdir(), f"farandole-{os.getpid()}")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def good(place: str, optimizer: Any) -> dict[str, Any]:
    """Arguments with which a call works; `place` names the first."""
    return {place: own_folder(), "state": {"optimizer": optimizer}}


_PATHS: list[Any] = [None, 5, b"run", "", "a\0b", object(), ["run"], torch.ones(2)]
# By argument. What a state holds last is wrong for a save only: a load looks at objects alone.
WRONG: dict[str, list[Any]] = {
    "folder": _PATHS,
    "path": _PATHS,
    "keep": [None, 0, -1, 1.0, True, "3", object()],
    "wait": [None, 0, 1.0, "no", object()],
    "state": [
        *(None, 5, "text", [1], object(), torch.ones(2), {1: 2}, {"": 1}, {"a/b": 1}),
        lambda: {"x": torch.nn.Linear(1, 1, device="meta")},
        *({"x": object()}, {"x": iter([1, 2])}, {"x": np.array([None])}, {"x": threading.Lock}),
        lambda: {"x": torch.ones(2).to_sparse()},
    ],
}
