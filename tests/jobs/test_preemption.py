# SPDX-License-Identifier: Apache-2.0
"""Signals that announce a preemption, and commits on the disk, under plain mpirun. Under a
supervisor: test_supervisor.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.process import JobError
from harness.supervised import check, results, training


def test_preemption_under_plain_mpirun(mpi_ranks, tmp_path: Path) -> None:
    """Exit code 0, the commit on the disk; the same command goes on."""
    env = {"FARANDOLE_CHECKPOINT_DIR": str(tmp_path / "kept")}
    event = "if fd.rank() == 1 and state.steps == 6 and first('it'): "
    source = training(event + "os.kill(os.getpid(), signal.SIGTERM)")
    out = mpi_ranks(source, 2, env).finish().check().out
    assert "rank 1 got SIGTERM" in out
    assert not results(out), "no rank has gone on behind train()"
    check(mpi_ranks(source, 2, env).finish().check().out, 2)


def test_signals_are_as_ever_without_a_folder(mpi_ranks) -> None:
    source = training("if state.steps == 6 and fd.rank(): os.kill(os.getpid(), signal.SIGTERM)")
    assert mpi_ranks(source, 2).finish().returncode != 0


def test_a_state_that_cannot_be_written(mpi_ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"FARANDOLE_CHECKPOINT_DIR": str(tmp_path / "file" / "below")}
    with pytest.raises(JobError, match="NotADirectoryError"):
        mpi_ranks(training(), 2, env).finish().check()
