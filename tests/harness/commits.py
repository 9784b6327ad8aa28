# SPDX-License-Identifier: Apache-2.0
"""Commits of plain values, and what other users do to files and folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from farandole import commits
from farandole.commits import Saved

__all__ = ["OTHER", "linked", "owned_by_another", "read_commit", "write_commit"]

OTHER = 65_534  # a user that is not this one


def write_commit(folder: Path, values: dict[str, Any]) -> None:
    commits.write_commit(folder, Saved(values))


def read_commit(folder: Path, like: dict[str, Any]) -> dict[str, Any] | None:
    found = commits.read_commit(folder, Saved(like))
    return None if found is None else found.values


def owned_by_another(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, OTHER, -1)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
