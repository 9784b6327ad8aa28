# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the public calls, so that each stands alone: the table of arguments says what each
argument is, and one list which errors all calls have. Done when a call is defined."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping

from farandole.calls.arguments import ARGUMENTS, Argument

_RAISES = """\
Raises:
    MismatchError: ranks disagree about this call; the text names them and both values.
    PeerError: a rank has died or left, or its arguments were wrong.
    StallError: a rank did not come in time.
    ShutdownError: before init(), or after shutdown().
    LibraryError: MPI, NCCL, CUDA or the system refused something.
    ValueError, TypeError: a wrong argument, on this rank or another: the same text on all.
"""
_EXAMPLES = "\nExamples:\n"


def complete(doc: str, arguments: Iterable[str], rows: Mapping[str, Argument] = ARGUMENTS) -> str:
    """A docstring with its arguments and errors, before its examples if there are any."""
    text, examples, code = inspect.cleandoc(doc).partition(_EXAMPLES)
    lines = [_line(name, rows) for name in arguments]
    sections = ["Arguments:\n" + "\n".join(lines) + "\n"] * bool(lines) + [_RAISES]
    return "\n\n".join([text.rstrip(), *(s.rstrip() for s in sections)]) + (
        "\n" + examples + code if examples else ""
    )


def of_one(doc: str) -> str:
    """The docstring of the form for one array, from that of its `grouped_` form."""
    doc = doc.replace(_line("tensors"), _line("tensor")).replace("grouped_", "")
    doc = re.sub(r"(>>> .*?\()\[(.*?)\]", r"\1\2", doc)
    return re.sub(r"^(    )\[(.*)\]$", r"\1\2", doc, flags=re.MULTILINE)


def of_waiting(doc: str) -> str:
    """The docstring of the form that waits, from that of its `_async` form."""
    told = r"Returns(\s+)a(\s+)handle,(\s+)whose(\s+)wait\(\)(\s+)gives(\s+)"
    doc = re.sub(told, lambda m: "Returns\n" if "\n" in "".join(m.groups()) else "Returns ", doc)
    return doc.replace("_async", "").replace(".wait()", "")


def _line(name: str, rows: Mapping[str, Argument] = ARGUMENTS) -> str:
    text = f"{name}: {rows[name].said}."
    return textwrap.fill(text, 100, initial_indent=4 * " ", subsequent_indent=8 * " ")
