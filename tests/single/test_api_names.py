# SPDX-License-Identifier: Apache-2.0
"""Every public name has a page, docstrings that stand alone, and complete types. tests/site looks
for the names on the pages."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import api_names  # noqa: E402

NAMES = api_names.names()
DEFINED = [name for name in NAMES if name.definition is not None]
ELSEWHERE = r"^(As in|See|The same as|Like) |; see \w+\.?$|\bsee below\b"


def label(name: api_names.Name) -> str:
    return f"{name.package}.{name.name}"


def test_all_are_listed() -> None:
    found = set(map(label, NAMES))
    known = ("allreduce", "torch.allreduce", "elastic.run", "jax.grad", "keras.load_model")
    assert {f"farandole.{name}" for name in known} <= found
    assert len(found) > 150
    assert len(DEFINED) > 0.7 * len(found)


def test_their_pages_are_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    assert not [label(name) for name in NAMES if f"{name.page}.md" not in contents]


@pytest.mark.parametrize("name", DEFINED, ids=label)
def test_its_docstrings_stand_alone(name: api_names.Name) -> None:
    for what, text in name.documents():
        assert len(text.split()) > 2, f"{what} has no docstring"
        assert not re.search(ELSEWHERE, text), f"{what}: {text!r}"


@pytest.mark.parametrize("name", DEFINED, ids=label)
def test_it_is_typed(name: api_names.Name) -> None:
    assert not name.untyped()


@pytest.mark.parametrize("package", api_names.IMPORTED)
def test_what_help_shows(package: str) -> None:
    """Also of calls that are made from others, which have no definition."""
    module = importlib.import_module(package)
    for name in module.__all__:
        one = getattr(module, name)
        if inspect.isfunction(one):
            assert len((inspect.getdoc(one) or "").split()) > 2, name
            signature = inspect.signature(one)
            empty = [x.name for x in signature.parameters.values() if x.annotation is x.empty]
            assert not empty, (name, empty)
            assert signature.return_annotation is not signature.empty, name
