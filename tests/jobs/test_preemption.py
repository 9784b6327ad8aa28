# SPDX-License-Identifier: Apache-2.0
"""Signals that announce a preemption, and commits on the disk, under plain mpirun. Under a
supervisor: test_elastic_ends.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.process import JobError
from harness.worlds import check, ends, training


def test_preemption_under_plain_mpirun(mpi_ranks, tmp_path: Path) -> None:
    """Exit code 0, the commit on the disk; the same command goes on."""
    env = {"FARANDOLE_CHECKPOINT_DIR": str(tmp_path / "kept")}
    event = "if fd.rank() == 1 and state.steps == 6 and first('it'): "
    source = training(event + "os.kill(os.getpid(), signal.SIGTERM)")
    out = mpi_ranks(source, 2, env).finish().check().out
    assert "rank 1 got SIGTERM" in out
    assert not ends(out), "no rank has gone on behind train()"
    check(mpi_ranks(source, 2, env).finish().check().out, 2)


def test_signals_are_as_ever_without_a_folder(mpi_ranks) -> None:
    source = training("if state.steps == 6 and fd.rank(): os.kill(os.getpid(), signal.SIGTERM)")
    assert mpi_ranks(source, 2).finish().returncode != 0


def test_a_state_that_cannot_be_written(mpi_ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"FARANDOLE_CHECKPOINT_DIR": str(tmp_path / "file" / "below")}
    with pytest.raises(JobError) as caught:
        mpi_ranks(training(), 2, env).finish().check()
    told = r"CheckpointError: .*Not a directory"
    assert len(re.findall(told, str(caught.value))) >= 2, "each rank says so"


def test_an_attribute_that_no_file_holds(mpi_ranks, tmp_path: Path) -> None:
    """Rank 0 writes, and all ranks raise what it raises."""
    env = {
        "FARANDOLE_CHECKPOINT_DIR": str(tmp_path / "kept"),
        "FARANDOLE_CHECKPOINT_SECONDS": "0",
    }
    event = "if state.steps == 6 and fd.rank() == 0: state.seen = [open]"
    source = training(event).replace(
        "    train(state)\n",
        "    try:\n        train(state)\n    except TypeError as error:\n"
        "        print(f'rank {fd.rank()} after {state.steps}: {error}', flush=True)\n"
        "        raise SystemExit(0)\n",
    )
    out = mpi_ranks(source, 2, env).finish().check().out
    for rank in (0, 1):
        text = rf"rank {rank} after 7: state, seen\.0: .* type builtin_function.* can hold .*texts"
        assert re.search(text, out), out
