# SPDX-License-Identifier: Apache-2.0
"""The public names of Horovod 0.28's modules, for tests of farandole.as_horovod."""

from __future__ import annotations

from pathlib import Path


def _read() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    module = ""
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("horovod"):
            module, _, line = line.partition(":")
            found[module] = []
        if not line.startswith("#"):
            found[module] += line.split()
    return found


MODULES = _read()
