# SPDX-License-Identifier: Apache-2.0
"""`farandole config`: prints the settings."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Sequence

import farandole
from farandole.config import Variable

EXAMPLES = """\
examples:
  farandole config                          # all settings, with their values here
  farandole config stall timeline           # those with one of these words in their names
  FARANDOLE_BLOCK_BYTES=1M farandole config block
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    text = "show only names with one of these parts (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)


def run(options: argparse.Namespace) -> int:
    """Show every setting: its value, where that comes from, its default and its meaning."""
    every = farandole.config()
    found = [v for v in every if _asked(v, options.names)]
    if not found:
        words = ", ".join(repr(name) for name in options.names)
        known = {word.lower() for v in every for word in v.name.split("_")}
        near = difflib.get_close_matches(options.names[0].lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"farandole config: no setting has {words} in its name{hint}", file=sys.stderr)
        return 1
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for variable in found:
        print("\n".join(_lines(variable, width)))
    return 0


def _asked(variable: Variable, names: Sequence[str]) -> bool:
    own = (variable.name.lower(), variable.alias.lower())
    return not names or any(name.lower() in text for name in names for text in own)


def _lines(variable: Variable, width: int) -> list[str]:
    about = [f"from: {variable.source}"]
    if variable.source != "default":
        about.append(f"default: {variable.default or 'empty'}")
    about.append("rank 0's value holds for all" if variable.job_wide else "each rank has its own")
    if variable.alias:
        about.append(f"also: {variable.alias}")
    text = f"{variable.name} = {shown(variable)}  ({'; '.join(about)})"
    head = textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)
    meaning = textwrap.wrap(variable.meaning, width - 4, break_on_hyphens=False)
    return [*head, *("    " + line for line in meaning)]


def shown(variable: Variable) -> str:
    """Formats the value with its unit, such as `32M` or `10 s`."""
    value = variable.value
    if variable.unit == "bytes":
        number = int(value)
        for letter, shift in (("G", 30), ("M", 20), ("K", 10)):
            if number and number % (1 << shift) == 0:
                return f"{number >> shift}{letter}"
        return f"{number} bytes"
    short = {"seconds": "s", "microseconds": "us"}.get(variable.unit)
    return f"{value} {short}" if short else value or "(empty)"
