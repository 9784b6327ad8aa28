# SPDX-License-Identifier: Apache-2.0
"""What commands read and write: values of options; consoles for terminals, launchers and files;
files that are refused before the work instead of after it."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from farandole.start.launchers import launcher

_WIDE = 160  # where nobody reads on a terminal


def console(shown: bool = True) -> Console:
    """A console for this process's output; not `shown`: it prints nothing.

    A launcher gives its ranks a pseudo-terminal even if its own output is a file: no escape codes.
    """
    launched = launcher().size > 0
    terminal = Console()
    plain = launched or not terminal.is_terminal
    return Console(
        width=shutil.get_terminal_size((_WIDE, 24)).columns if plain else None,
        force_terminal=False if plain else None,
        quiet=not shown,
        highlight=False,
    )


def why_not(path: Path | None) -> str:
    """Why this file can't be written; empty if it can, or if there is none to write."""
    if path is None:
        return ""
    if path.is_dir():
        return f"{path} is a folder"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"{path}: there is no folder {folder}"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path}: no permission to write there"
    return ""


def why_no_plot(path: Path | None) -> str:
    """Why no picture can be written to this file; empty if one can, or if there is none."""
    if path is None:
        return ""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as reason:
        return f"--plot: {reason}; remedy: pip install matplotlib"
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        return f"--plot {path}: the name must end in one of .{', .'.join(sorted(kinds))}"
    return why_not(path)


def whole(least: int) -> Callable[[str], int]:
    """The type of an option for argparse: a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """The type of an option for argparse: a time."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return float(text)
