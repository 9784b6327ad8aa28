# SPDX-License-Identifier: Apache-2.0
"""Tests that run once more under other circumstances: in another file, which makes these."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["borrow", "load", "optimizers_with"]

_PARALLEL = Path(__file__).resolve().parents[1] / "parallel"


def load(name: str, borrower: str) -> ModuleType:
    """tests/parallel/test_`name`.py as a module of the borrower's own."""
    path = _PARALLEL / f"test_{name}.py"
    spec = importlib.util.spec_from_file_location(f"{borrower}_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def borrow(
    names: Sequence[str],
    borrower: str,
    without: Sequence[str] = (),
    fixtures: Sequence[str] = (),
) -> dict[str, Any]:
    """The tests of these files, by names that tell the file, for the borrower's globals().

    And the fixtures that are named; no others: one for all tests of a file would be one for all
    tests of the borrower.
    """
    found: dict[str, Any] = {}
    for name in names:
        for own, thing in vars(load(name, borrower)).items():
            if own.startswith("test_") and own not in without:
                found[f"test_{name}_{own[5:]}"] = thing
            elif own in fixtures:
                found[own] = thing
    return found


def optimizers_with(option: str) -> Any:
    """A fixture for all tests of a file: DistributedOptimizers have this option, but for Adasum."""

    @pytest.fixture(autouse=True)
    def made_so(monkeypatch: pytest.MonkeyPatch) -> None:
        hvd = importlib.import_module("farandole.torch")
        plain = hvd.DistributedOptimizer

        def make(optimizer: Any, *args: Any, **options: Any) -> Any:
            if options.get("op") != hvd.Adasum:
                options.setdefault(option, True)
            return plain(optimizer, *args, **options)

        monkeypatch.setattr(hvd, "DistributedOptimizer", make)

    return made_so
