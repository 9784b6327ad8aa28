# SPDX-License-Identifier: Apache-2.0
"""What a client's suite is: its release, its tests, and what is known of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
# Arguments of pytest: no configuration of ours; {source} is where the sdist or repository lies.
ALONE = ("--noconftest", "-c", os.devnull)
OWN_ROOT = ("-c", os.devnull, "--rootdir={source}")


@dataclass(frozen=True)
class Suite:
    """Tests of one client. Texts may have {source}, {ranks} and {python} in them."""

    client: str
    what: str
    packages: tuple[str, ...]  # for pip; the first is the client, unless it is a repository
    mode: str  # of in_rank.py, as `runner`
    runner: str
    arguments: tuple[str, ...]
    ranks: tuple[int, ...] = (2,)
    select: str = ""  # of pytest's -k
    sdist: bool = False
    repository: bool = False  # {source} is CLIENT_SOURCE
    launched: bool = True  # by mpirun; False: the suite starts its ranks itself
    each: bool = False  # every test is a job of its own, as every module is
    quick: bool = False  # CI runs it
    environment: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)  # part of a failing test's name -> why
    left_out: Mapping[str, str] = field(default_factory=dict)  # part of the name -> why
    seconds: float = 600


def program(name: str) -> tuple[str, ...]:
    """pytest's arguments for a program of ours."""
    return (*ALONE, str(PROGRAMS / f"{name}.py"))
