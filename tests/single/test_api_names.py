# SPDX-License-Identifier: Apache-2.0
"""Every public name has a page and docstrings that stand alone; mypy sees that it is typed.
tests/site looks for the names on the pages."""

from __future__ import annotations

import ast
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
def test_every_collective_takes_a_timeout(name: api_names.Name) -> None:
    """As all else that ranks agree on, sets aside: these are made before anybody can wait."""
    node = name.definition
    if isinstance(node, ast.FunctionDef) and "process_set" not in node.name:
        by = [ast.unparse(x).partition("(")[0] for x in node.decorator_list]
        given = [x.arg for x in (*node.args.args, *node.args.kwonlyargs)]
        assert not {"collective", "waiting", "public"} & set(by) or "timeout" in given


@pytest.mark.parametrize("package", ["farandole", "farandole.torch"])
def test_a_call_is_defined_under_its_name(package: str) -> None:
    """Editors find it, and its signature shows what it takes."""
    module = importlib.import_module(package)
    functions = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert len(functions) > 50
    for name in functions:
        code = inspect.unwrap(getattr(module, name))
        lines, first = inspect.getsourcelines(code)
        assert code.__name__ == name, f"{code.__module__}:{first}"
        assert any(line.startswith(f"def {name}(") for line in lines), name
        kinds = {x.kind for x in inspect.signature(code).parameters.values()}
        fixed = inspect.Parameter.VAR_POSITIONAL not in kinds
        assert fixed or name in ("empty", "run"), name


def test_torch_takes_what_farandole_takes() -> None:
    """A call on tensors means the same in both: torch's may take more."""
    neutral, torch = (importlib.import_module(x) for x in ("farandole", "farandole.torch"))
    for name in set(neutral.__all__) & set(torch.__all__) - {"empty"}:
        ours, theirs = getattr(neutral, name), getattr(torch, name)
        if ours is theirs or not inspect.isfunction(ours):
            continue
        wanted = inspect.signature(ours).parameters.values()
        given = inspect.signature(theirs).parameters
        assert [(x.name, x.default) for x in wanted] == [
            (x.name, given[x.name].default) for x in wanted
        ], name
        places = [x.name for x in wanted if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert places == list(given)[: len(places)], name


@pytest.mark.parametrize("package", ["farandole", "farandole.torch", "farandole.numpy"])
def test_a_package_shows_nothing_else(package: str) -> None:
    module = importlib.import_module(package)
    shown = {n for n, x in vars(module).items() if n[0] != "_" and not inspect.ismodule(x)}
    assert shown <= set(module.__all__)
