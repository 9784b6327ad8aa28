# SPDX-License-Identifier: Apache-2.0
"""How pages and messages are written: the list of words of CONTRIBUTING.md's rule on language. And
how the docstrings that pages show are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]

# A pattern, what it finds, and what to write.
BANNED = (
    (r"\banew\b", "started anew", "again; restarts"),
    (r"\bas ever\b", "clip as ever", "as usual"),
    (r"\b(is|are|was|were) told (of|by)\b", "a rank is told of it", "who reports it?"),
    (r"(?<!-)\b(begin|begins|beginning|begun|began)\b", "a round begins", "start"),
    (r"\bbeside\b", "farandole beside MPI", "next to; compared with"),
    (r"(?<!there )\bis no (?!longer|more)\w+", "an int is no name", "is not a"),
    (
        r"\bof (its|their|your|his|our|one's) own(?=[.,;:)]|$| (and|for|in|over)\b)",
        "a job of its own",
        "its own job",
    ),
    (r"\bof ours\b", "threads of ours", "farandole's"),
    (r"(^|[.:;] |\| )Where\b", "Where it fails, call it", "If"),
    (
        r"\banother (order|name|number|shape|op|dtype|amount|version|way)\b",
        "in another order",
        "a different",
    ),
    (r"\ba whole (program|script)\b", "a whole program", "complete"),
)


def _prose(page: Path) -> str:
    """The page without blocks and spans of code; lines stay where they are."""
    text = re.sub(
        r"^ *```.*?^ *```", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.M | re.S
    )
    return re.sub(r"`[^`\n]*`", "`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_banned_word(page: Path) -> None:
    lines = enumerate(_prose(page).splitlines(), 1)
    found = [
        f"{page.name}:{number}: {match[0].strip()!r}; write: {instead}"
        for number, line in lines
        for pattern, _, instead in BANNED
        if (match := re.search(pattern, line))
    ]
    assert not found, "\n".join(found)


def _messages(module: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each literal that is not a docstring; what stands around `{...}` is one."""
    tree = ast.parse(module.read_text())
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, with_docstring) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text and id(node) not in docstrings:
            yield node.lineno, text


@pytest.mark.parametrize("folder", ["pyruntime", "adapters", "extras"])
def test_no_message_has_a_banned_word(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    texts = [(module, *found) for module in modules for found in _messages(module)]
    assert len(texts) > 50
    found = [
        f"{module.relative_to(ROOT)}:{number}: {match[0].strip()!r}; write: {instead}"
        for module, number, text in texts
        for pattern, _, instead in BANNED
        if (match := re.search(pattern, text))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("pattern", "text"), [row[:2] for row in BANNED])
def test_the_list_finds_what_it_bans(pattern: str, text: str) -> None:
    assert re.search(pattern, text)


@pytest.mark.parametrize("module", sorted((ROOT / "adapters").glob("*/elastic.py")), ids=str)
def test_docstrings_of_states_say_it_themselves(module: Path) -> None:
    """Their pages show no class that `As in State` could lead to."""
    nodes = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    assert nodes
    found = [
        node.name for node in nodes if (ast.get_docstring(node) or "").startswith(("As in", "See "))
    ]
    assert not found, found
