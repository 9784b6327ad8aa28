# SPDX-License-Identifier: Apache-2.0
"""How pages, messages and docstrings are written: the list of words of CONTRIBUTING.md's rule on
language."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
PRODUCT = ["pyruntime", "adapters", "extras"]

# A pattern, and what to write.
BANNED = (
    (r"\banew\b", "again; restarts"),
    (r"\bas ever\b", "as usual"),
    (r"\b(is|are|was|were) told (of|by)\b", "who reports it?"),
    (r"(?<!-)\b(begin|begins|beginning|begun|began)\b", "start"),
    (r"\bbeside\b", "next to; compared with"),
    (r"(?<!there )\bis no (?!longer|more)\w+", "is not a"),
    (r"\bof (its|their|your|his|our|one's) own(?=[.,;:)]|$| (and|for|in|over)\b)", "its own job"),
    (r"\bof ours\b", "farandole's"),
    (r"(^|[.:;] |\| )Where\b", "If"),
    (r"\banother (order|name|number|shape|op|dtype|amount|version|way)\b", "a different"),
    (r"\ba whole (program|script)\b", "complete"),
)


def _found(place: str, text: str) -> Iterator[str]:
    """Each banned word in a text."""
    for pattern, instead in BANNED:
        if match := re.search(pattern, text):
            yield f"{place}: {match[0].strip()!r}; write: {instead}"


def _prose(page: Path) -> str:
    """The page without blocks and spans of code; lines stay where they are."""
    text = re.sub(
        r"^ *```.*?^ *```", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.M | re.S
    )
    return re.sub(r"`[^`\n]*`", "`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_banned_word(page: Path) -> None:
    lines = enumerate(_prose(page).splitlines(), 1)
    found = [word for number, line in lines for word in _found(f"{page.name}:{number}", line)]
    assert not found, "\n".join(found)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def _trees(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for module in sorted((ROOT / folder).rglob("*.py")):
        yield module.relative_to(ROOT), ast.parse(module.read_text())


def _messages(folder: str) -> Iterator[tuple[str, str]]:
    """Place and text of each literal that is not a docstring; what stands around `{...}` is one."""
    for module, tree in _trees(folder):
        docstrings = set(map(id, _docstrings(tree)))
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and " " in text and id(node) not in docstrings:
                yield f"{module}:{node.lineno}", text


def _documents(folder: str) -> Iterator[tuple[str, str]]:
    """Place and text of each docstring, on one line and without spans of code."""
    for module, tree in _trees(folder):
        for node in _docstrings(tree):
            text = " ".join(str(node.value).split())
            yield f"{module}:{node.lineno}", re.sub(r"`[^`]*`", "`", text)


@pytest.mark.parametrize("folder", PRODUCT)
@pytest.mark.parametrize("texts", [_messages, _documents])
def test_no_text_has_a_banned_word(
    texts: Callable[[str], Iterator[tuple[str, str]]], folder: str
) -> None:
    every = list(texts(folder))
    assert len(every) > 50
    found = [word for place, text in every for word in _found(place, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", PRODUCT)
def test_docstrings_say_it_themselves(folder: str) -> None:
    """help() and the pages show no class that `As in State` could lead to."""
    texts = list(_documents(folder))
    found = [place for place, text in texts if re.match("(As|See) ", text)]
    assert not found, found
