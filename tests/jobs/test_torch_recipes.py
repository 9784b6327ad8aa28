# SPDX-License-Identifier: Apache-2.0
"""The recipes that use torch's own libraries do what their head comments say, in a few lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.mpirun import mpirun

RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples/recipes").glob("*.py"))
LINES = 40  # more is a program of its own
SECONDS = 150


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: those that keep a file go on from it."""
    text = recipe.read_text()
    monkeypatch.chdir(tmp_path)
    promised = re.findall(r"^    (.+: True)$", text, re.MULTILINE)
    assert promised, "it states no result"
    assert len(text.splitlines()) <= LINES
    for turn in range(2):
        if turn and not list(tmp_path.iterdir()):
            break
        result = mpirun([sys.executable, str(recipe)], 2, timeout=SECONDS)
        assert result.returncode == 0, result.out
        said = [line for line in result.out.splitlines() if line.endswith((": True", ": False"))]
        assert said == promised, result.out
