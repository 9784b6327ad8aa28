# SPDX-License-Identifier: Apache-2.0
"""Helpers for commands: option types for argparse, and checks to make before work starts."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path

PrintLine = Callable[[str], None]  # prints a line


def rank_zero_printer(rank: int) -> PrintLine:
    """Returns a function that prints and flushes on rank 0 and does nothing on other ranks."""
    return functools.partial(print, flush=True) if rank == 0 else lambda line: None


def why_unwritable(path: Path | None) -> str:
    """Returns the reason why a file can't be written, or "" if it can. A `path` of None means that
    no file is to be written."""
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


def int_at_least(least: int) -> Callable[[str], int]:
    """Returns an option type for argparse that accepts integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """Option type for argparse that accepts a positive number of seconds."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return float(text)
