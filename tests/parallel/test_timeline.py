# SPDX-License-Identifier: Apache-2.0
"""Traces that every rank writes: complete, balanced, and alike in what all ranks see."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import farandole as fd

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observing.md"
NAMES = ["first", "second", "third"]
STEPS = 6


def shared_path(folder: Path, name: str) -> Path:
    """Rank 0's choice, for all ranks."""
    return Path(fd.broadcast_object(str(folder / name), root_rank=0))


def work(start=0):
    for step in range(start, STEPS):
        handles = [
            fd.allreduce_async(np.full(100_000, fd.rank() + k, np.float32), name=name)
            for k, name in enumerate(NAMES)
        ]
        for handle in handles:
            handle.wait()
        fd.allreduce(np.ones(2) * step)  # unnamed, rides along


def own_file(path: Path) -> Path:
    return path if fd.rank() == 0 else path.with_stem(f"{path.stem}.rank{fd.rank()}")


def test_every_tensor_is_followed_from_submission_to_its_end(tmp_path):
    path = shared_path(tmp_path, "trace.json")
    fd.start_timeline(path, mark_cycles=True)
    work()
    fd.stop_timeline()
    fd.stop_timeline()  # nothing to stop
    fd.barrier()
    events = json.loads(own_file(path).read_text())
    assert {e["pid"] for e in events} == {fd.rank()}
    submits = Counter(e["name"] for e in events if e.get("cat") == "submit")
    assert {name: submits[name] for name in NAMES} == dict.fromkeys(NAMES, STEPS)
    assert sum(submits.values()) == 4 * STEPS
    open_spans = Counter()
    last = {}
    for e in events:
        if e["ph"] in "be" and e["cat"] == "tensor":
            open_spans[e["id"], e["name"]] += 1 if e["ph"] == "b" else -1
            assert open_spans[e["id"], e["name"]] in (0, 1)
            assert e["ts"] >= last.get(e["id"], 0)
            last[e["id"]] = e["ts"]
    assert not any(open_spans.values())
    assert {f"allreduce.{name}" for name in NAMES} < {name for _, name in open_spans}
    starts = {e["id"] for e in events if e["ph"] == "s"}
    ends = {e["id"] for e in events if e["ph"] == "f"}
    assert len(starts) == 4 * STEPS
    assert len(ends) == 3 * STEPS  # those that moved in a bucket
    assert ends < starts
    buckets = [e for e in events if e.get("cat") == "bucket" and e["ph"] == "X"]
    assert sum(e["args"]["bytes"] for e in buckets) == 3 * STEPS * 400_000
    assert any(e["name"] == "CYCLE_START" for e in events)
    if fd.size() > 1:
        blocks = {e["name"] for e in events if e.get("cat") == "block"}
        assert blocks == {"pack", "reduce", "unpack"}
        for e in events:  # blocks lie inside their bucket
            if e.get("cat") == "block":
                assert any(
                    b["ts"] <= e["ts"] and e["ts"] + e["dur"] <= b["ts"] + b["dur"] + 0.01
                    for b in buckets
                )


def test_the_ranks_of_a_host_have_one_clock_and_join_into_one_trace(tmp_path):
    path = shared_path(tmp_path, "job.json")
    fd.start_timeline(str(path))
    work()
    fd.stop_timeline()
    fd.barrier()
    if fd.rank() == 0:
        command = re.search(r"^\$ (python -c .*\n.*)$", PAGE.read_text(), re.MULTILINE)
        assert command
        text = command[1].replace("python", sys.executable, 1).replace("run*", "job*")
        subprocess.run(["bash", "-c", text], cwd=path.parent, check=True)
        merged = json.loads((path.parent / "merged.json").read_text())
        traces = [[e for e in merged if e["pid"] == rank] for rank in range(fd.size())]
        assert all(traces)
        ids = [e["id"] for t in traces for e in t if e["ph"] == "s"]
        assert len(set(ids)) == len(ids)
        # All ranks moved the same bucket at the same time: their clocks are one.
        first = [
            next((e["ts"], e["ts"] + e["dur"]) for e in t if e["name"] == "bucket 1")
            for t in traces
            if any(e["name"] == "bucket 1" for e in t)
        ]
        assert all(begin < first[0][1] and end > first[0][0] for begin, end in first)
    fd.barrier()


def test_a_timeline_may_be_started_again(tmp_path):
    for name in ("one.json", "two.json"):
        path = shared_path(tmp_path, name)
        fd.start_timeline(path)
        with pytest.raises(ValueError, match="stop_timeline"):
            fd.start_timeline(path)
        work(STEPS - 1)
        fd.stop_timeline()
        fd.barrier()
        submits = [e for e in json.loads(own_file(path).read_text()) if e.get("cat") == "submit"]
        assert len(submits) >= 4
    with pytest.raises(fd.LibraryError, match="cannot write the timeline"):
        fd.start_timeline(tmp_path / "missing" / "x.json")


def test_a_rank_may_trace_alone(tmp_path):
    if fd.rank() == fd.size() - 1:
        fd.start_timeline(tmp_path / "alone.json")
    work()
    fd.stop_timeline()
    assert bool(list(tmp_path.iterdir())) == (fd.rank() == fd.size() - 1)
