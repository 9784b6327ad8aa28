# SPDX-License-Identifier: Apache-2.0
"""Generates mutants: small wrong changes to a C++ or Python source, found in the source's tokens.

A mutant changes a comparison, negates a condition, adds one to an integer, replaces an operator or
a word by another, or deletes a statement. Comments, strings and `#` lines are never changed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

_SKIPPED = {  # key: suffix of the language
    ".cc": r"""//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*|\bstatic_assert\(.*?;
      |R"(?P<raw>\w*)\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    ".py": r"""\#[^\n]*|\"{3}.*?\"{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
}
_CODE = r"""(?P<number>\b\d[\w.']*)|(?P<word>[A-Za-z_]\w*)
  |(?P<sign><=>|<<=|>>=|->|::|&&|\|\||:=|\*\*|//|\+\+|--|<<|>>|[<>=!+\-*/%&|^]=|[^\s\w])"""
_TOKENS = {
    suffix: re.compile(f"(?P<skip>{skipped})|{_CODE}", re.VERBOSE | re.DOTALL | re.MULTILINE)
    for suffix, skipped in _SKIPPED.items()
}
_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_LOGIC = {"&&": "||", "||": "&&", "and": "or", "or": "and", "!": "", "not": "", "is": "is not"}
_SIGNS = {"+": "-", "-": "+", "+=": "-=", "-=": "+=", "*": "+", "/": "*", "<<": ">>", ">>": "<<"}
_NO_SIGNS = re.compile('"|import ')  # in lines that match, signs are not arithmetic
_WORDS = {"true": "false", "false": "true", "True": "False", "False": "True"} | {
    "continue": "break",
    "break": "continue",
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_OPEN, _CLOSE = "([{", ")]}"
# A C++ statement that may be deleted starts after one of the tokens in _STARTS, but not with one of
# _KEPT. The tokens before a brace tell whether it opens a block or an initialiser.
_STARTS = {";", "{", "}", ")", "else"}
_BLOCKS = {")", "]", ";", "}", "else", "do", "try", "const", "noexcept", "override", "mutable"}
_HEAD_ENDS = {"(", "{", "[", "=", "+=", "-=", "++", "--", "|=", "&="}
_TYPE_ENDS = {">", "&", "*", "&&"}
_KEPT = {
    *("return", "break", "continue", "goto", "if", "else", "for", "while", "do", "switch", "case"),
    *("default", "using", "namespace", "template", "typedef", "class", "struct", "enum", "public"),
    *("private", "static", "const", "constexpr", "auto", "override", "noexcept"),
}


@dataclass(frozen=True, order=True)
class Mutant:
    """Replaces `source[start:end]` of a file by `text`."""

    path: str
    start: int
    end: int
    text: str
    kind: str

    def apply(self, source: str) -> str:
        """Returns the source with the change."""
        return source[: self.start] + self.text + source[self.end :]


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


_Change = tuple[int, int, str, str]


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in order of position."""
    suffix = Path(path).suffix
    found = _TOKENS[suffix].finditer(source)
    tokens = [_Token(str(m.lastgroup), m[0], m.start(), m.end()) for m in found]
    code = [token for token in tokens if token.kind != "skip"]
    if not code:
        return []
    changes = [*_single(source, code), *_conditions(source, code, suffix)]
    changes += _statements_cpp(code) if suffix == ".cc" else _statements_python(source)
    return sorted(Mutant(path, *change) for change in changes)


def _single(source: str, code: list[_Token]) -> Iterator[_Change]:
    """Changes of single tokens. `<` and `*` count as operators only between spaces."""
    for token, after in zip(code, [*code[1:], code[-1]], strict=True):
        text = token.text
        binary = source[token.start - 1 : token.end + 1].split() == [text]
        integer = re.fullmatch(r"([\d'_]+)([uUlL]*)", text)
        if token.kind == "number" and integer:
            grown = int(integer[1].replace("'", "")) + 1
            yield token.start, token.end, f"{grown}{integer[2]}", "constant"
        elif binary and text in _COMPARISONS:
            yield token.start, token.end, _COMPARISONS[text], "comparison"
        elif binary and text in _SIGNS and not _NO_SIGNS.search(_line(source, token.start)):
            yield token.start, token.end, _SIGNS[text], "arithmetic"
        elif text in _LOGIC and (text, after.text) != ("is", "not"):
            yield token.start, token.end, _LOGIC[text], "logic"
        elif text in _WORDS or (text in _CALLS and after.text in "(<"):
            yield token.start, token.end, (_WORDS | _CALLS)[text], "word"


def _line(source: str, place: int) -> str:
    return source[source.rfind("\n", 0, place) + 1 : source.find("\n", place)]


def _conditions(source: str, code: list[_Token], suffix: str) -> Iterator[_Change]:
    """Negations of `if (x)` and `if x:`, except if an operator in x has mutants already."""
    operators = {*_COMPARISONS, *_LOGIC, "=", ":=", ";"}
    for i, token in enumerate(code[:-1]):
        if token.text not in ("if", "elif"):
            continue
        if suffix == ".py":
            heads = _line(source, token.start).lstrip().startswith(token.text)
            inside = _until(code, i + 1, {":"}) if heads else []
            form = "not ({})"
        else:
            inside = _until(code, i + 2, {")"}) if code[i + 1].text == "(" else []
            form = "!({})"
        if inside and not operators & {part.text for part in inside}:
            start, end = inside[0].start, inside[-1].end
            yield start, end, form.format(source[start:end]), "condition"


def _until(code: list[_Token], first: int, ends: set[str]) -> list[_Token]:
    """The tokens from `first` to the first of `ends` that is outside brackets."""
    depth = 0
    for i in range(first, len(code)):
        if depth == 0 and code[i].text in ends:
            return code[first:i]
        depth += (code[i].text in _OPEN) - (code[i].text in _CLOSE)
    return []


def _statements_cpp(code: list[_Token]) -> Iterator[_Change]:
    """Calls, assignments and throws, but not declarations or functions."""
    inner: list[bool] = []  # for each open bracket: True if it contains statements
    for i, token in enumerate(code[1:], 1):
        last = code[i - 1].text
        if last in _OPEN:
            bare = inner[-1:] == [True] and code[i - 2].text == "{"
            inner.append(last == "{" and (bare or _begins_block(code[: i - 1])))
        elif last in _CLOSE:
            inner[-1:] = []
        if last not in _STARTS or token.kind != "word" or token.text in _KEPT:
            continue
        if not (inner and inner[-1]):
            continue
        inside = _until(code, i, {";"})
        head = list(takewhile(lambda part: part.text not in _HEAD_ENDS, inside))
        declares = any(
            name.kind == "word" and (before.kind == "word" or before.text in _TYPE_ENDS)
            for before, name in pairwise(head)
        )
        defines = any(
            brace.text == "{"
            and (before.text in ")}" or before.text in _KEPT)
            and _is_outside(inside, brace)
            for before, brace in pairwise(inside)
        )
        if len(inside) > 1 and (token.text == "throw" or not declares) and not defines:
            yield token.start, inside[-1].end, "(void)0", "statement"


def _begins_block(before: list[_Token]) -> bool:
    """True if a brace after these tokens opens a block. `-> Type` may precede the brace."""
    names = takewhile(lambda part: part.kind == "word" or part.text == "::", reversed(before))
    ahead = before[: len(before) - len(list(names))]
    returns = bool(ahead) and ahead[-1].text == "->"
    return returns or before[-1].text in _BLOCKS


def _is_outside(inside: list[_Token], token: _Token) -> bool:
    """True if no bracket of the statement encloses the token."""
    before = [part.text for part in inside if part.start < token.start]
    return sum((text in _OPEN) - (text in _CLOSE) for text in before) == 0


def _statements_python(source: str) -> Iterator[_Change]:
    """Calls, raises, and those assignments in functions whose targets are not plain variables."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    gone = {
        node
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.AugAssign | ast.Raise)
        or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    }
    data = source.encode()
    for node in gone:
        begin = len(data[: starts[node.lineno - 1] + node.col_offset].decode())
        length = len(ast.get_source_segment(source, node) or "")
        yield begin, begin + length, "pass", "statement"
