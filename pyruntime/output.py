# SPDX-License-Identifier: Apache-2.0
"""For commands: values of options, and files that are refused before the work instead of after."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path

Tell = Callable[[str], None]  # prints a line


def teller(rank: int) -> Tell:
    """Prints lines at once on rank 0, and nothing on others."""
    return functools.partial(print, flush=True) if rank == 0 else lambda line: None


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
