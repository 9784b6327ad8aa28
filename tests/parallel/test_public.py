# SPDX-License-Identifier: Apache-2.0
"""What users see of the API: every public call has an example that holds, and dir() shows nothing
else. The examples run in a world of one."""

from __future__ import annotations

import doctest
import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farandole
import farandole.numpy
import farandole.torch
from harness.world import TESTS

pytestmark = pytest.mark.ranks(1)
PACKAGES: tuple[Any, ...] = (farandole, farandole.numpy, farandole.torch)


def public_calls() -> Iterator[tuple[str, Any, Any]]:
    """(name, object, its package), each object once."""
    seen = set()
    for package in PACKAGES:
        for name in package.__all__:
            found = getattr(package, name)
            if (inspect.isfunction(found) or inspect.isclass(found)) and id(found) not in seen:
                seen.add(id(found))
                yield name, found, package


def examples() -> Iterator[doctest.DocTest]:
    parser = doctest.DocTestParser()
    for name, found, package in public_calls():
        names = {"hvd": package, "farandole": farandole, "np": np, "torch": torch}
        where = f"{package.__name__}.{name}"
        yield parser.get_doctest(inspect.getdoc(found) or "", names, where, None, 0)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_shows_what_is_public(package: Any) -> None:
    assert dir(package) == sorted(package.__all__)
    assert not [name for name in dir(package) if name.startswith("_") and name != "__version__"]


def test_every_call_has_an_example_and_says_what_it_takes() -> None:
    calls = [(name, found) for name, found, _ in public_calls() if inspect.isfunction(found)]
    assert len(calls) > 70
    for name, found in calls:
        doc = inspect.getdoc(found) or ""
        assert "\nExamples:\n" in doc, name
        missing = [one for one in inspect.signature(found).parameters if one not in doc]
        assert not missing, (name, missing)
        assert max(map(len, doc.splitlines())) <= 100, name


@pytest.mark.filterwarnings("default")
def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples():
        runner.run(test)
    failed, attempted = runner.summarize()
    assert failed == 0
    assert attempted > 90


def test_the_program_that_type_checkers_read_runs() -> None:
    """tests/single/test_types.py"""
    runpy.run_path(str(TESTS / "typing" / "program.py"))
    farandole.init()
