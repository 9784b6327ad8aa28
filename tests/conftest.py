# SPDX-License-Identifier: Apache-2.0
"""Chooses the harness's plugin (outside, or inside a rank) and gives tests their launchers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from harness.fork import ForkJob
from harness.mpirun import MpiJob
from harness.seed import SEED
from harness.supervised import SupervisedJob

if "FARANDOLE_TEST_STEP" not in os.environ:  # a rank has harness.inner, from rank_main
    pytest_plugins = ["harness.outer"]

# Of no interest here: how the machine at hand was tuned, and how wide its terminal is.
os.environ["FARANDOLE_TUNING"] = "none"
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)
# `python` is the one that runs the tests: a system may have none of that name.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

# pytest's --hypothesis-profile=long takes the other profile; for tests/parallel, within --inner.
SAME = settings(deadline=None, database=None, print_blob=True)
settings.register_profile("quick", SAME, max_examples=30)
settings.register_profile("long", SAME, max_examples=1000)
settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The same examples on every rank."""
    # Environments without Hypothesis, as on a machine with a card, have no such option.
    if config.getoption("hypothesis_seed", default="none") is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    """Tells the seed; pytest prints it before the tests."""
    return f"random tests: SEED={SEED}"


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Ends what a test leaves open."""
    with contextlib.ExitStack() as found:
        yield found


@pytest.fixture
def fork_ranks(tmp_path: Path, stack: contextlib.ExitStack) -> Callable[..., ForkJob]:
    """fork_ranks(source, ranks, env=None) -> ForkJob: that Python text on ranks without MPI."""

    def start(source: str, ranks: int, env: dict[str, str] | None = None) -> ForkJob:
        return stack.enter_context(ForkJob(_program(tmp_path, source), ranks, env))

    return start


@pytest.fixture
def mpi_ranks(tmp_path: Path, stack: contextlib.ExitStack) -> Callable[..., MpiJob]:
    """mpi_ranks(source, ranks, env=None, mpi_args=()) -> MpiJob: that text under mpirun."""

    def start(
        source: str,
        ranks: int,
        env: dict[str, str] | None = None,
        mpi_args: tuple[str, ...] = (),
    ) -> MpiJob:
        return stack.enter_context(MpiJob(_program(tmp_path, source), ranks, env, mpi_args))

    return start


@pytest.fixture
def elastic_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> Callable[..., SupervisedJob]:
    """elastic_ranks(source, ranks, *options, **env) -> SupervisedJob: that text under `farandole
    run --elastic`, in a folder of its own; ranks 0: as many as the options say."""
    monkeypatch.chdir(tmp_path)

    def start(source: str, ranks: int, *options: str, **env: str) -> SupervisedJob:
        words = ["-np", str(ranks), *options] if ranks else options
        return stack.enter_context(SupervisedJob(words, _program(tmp_path, source), env))

    return start


def _program(folder: Path, source: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(source)
    return [sys.executable, str(path)]
