# SPDX-License-Identifier: Apache-2.0
"""Timelines where no job is needed: settings, files cut short, and what a report says."""

import json
import os
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

import farandole as fd
from farandole.observe import trace, trace_report
from farandole.tools import cli

HEAD = {
    "ph": "M",
    "name": "farandole",
    "pid": 1,
    "args": {"rank": 1, "size": 2},
}


def write(path, events):
    lines = ",\n".join(json.dumps(event) for event in [HEAD, *events])
    path.write_text(f"[\n{lines}\n]")


def test_not_initialised():
    fd.shutdown()
    for call in (lambda: fd.start_timeline("x.json"), fd.stop_timeline):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()


@pytest.mark.parametrize("variable", ["FARANDOLE_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_setting_traces_the_whole_run(tmp_path, variable):
    path = tmp_path / "run.json"
    program = (
        "import numpy as np, farandole as fd\n"
        "fd.init(); fd.allreduce(np.ones(3), name='loss'); fd.allreduce(np.ones(3), name='loss')"
    )
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, variable: str(path)}, check=True
    )
    events = trace.read(path).events
    assert [e["name"] for e in events if e.get("cat") == "submit"] == ["loss", "loss"]


def test_a_trace_cut_anywhere_can_be_read(tmp_path):
    events = [{"ph": "i", "name": f"e{i}", "ts": float(i)} for i in range(3)]
    path = tmp_path / "whole.json"
    write(path, events)
    whole = path.read_text()
    for length in range(whole.index("e0"), len(whole) + 1):
        path.write_text(whole[:length])
        found = trace.read(path).events
        assert found == trace.read(path).events
        assert found[1:] == events[: len(found) - 1]
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a trace of farandole"):
        trace.read(path)


def span(category, name, begin, duration):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}


def test_a_step_is_taken_apart():
    events = []
    for begin in (0.0, 10_000.0, 20_000.0):
        events += [span("submit", "w", begin, 1.0), span("submit", "b", begin + 1, 1.0)]
        if begin == 20_000.0:
            break
        for kind, at in (("b", 100.0), ("e", 600.0)):
            name = "NEGOTIATE_ALLREDUCE"
            events.append(
                {"ph": kind, "cat": "tensor", "id": begin, "name": name, "ts": begin + at}
            )
        events += [
            span("bucket", "bucket 1", begin + 1000, 4000.0),
            span("block", "pack", begin + 1000, 500.0),
            span("block", "reduce", begin + 2000, 250.0),
            span("wait", "wait", begin + 4000, 3000.0),
        ]
    steps = trace_report.analyse(trace.RankTrace(0, 1, events))
    assert len(steps) == 2
    for step in steps:
        assert (step.time, step.waiting, step.moving, step.hidden) == (10.0, 3.0, 4.0, 3.0)
        assert (step.negotiating, step.packing, step.reducing) == (0.5, 0.5, 0.25)
        assert step.overlap == 0.75
    busy = trace_report.Step(1, 0.0, 10.0, 1.0, 4.0, 4.0, 0, 0, 0, 0, 0)
    console = Console(file=StringIO(), width=100)
    trace_report.show({0: steps * 4, 1: [busy] * 8}, console)
    assert "Slowest: rank 1, which waits least (10 % of its step" in console.file.getvalue()


def shown(steps):
    console = Console(file=StringIO(), width=80)
    trace_report.show(steps, console)
    return console.file.getvalue()


def steps_of(rank, waits):
    return [trace_report.Step(rank, 0.0, 1000.0, w, 400.0, 300.0, 1, 1, 10, 10, 10) for w in waits]


def test_nobody_is_called_slow_within_the_noise():
    waits = [100, 500, 200, 400, 300, 250, 350, 450]
    for others in ([w + 20 for w in waits], waits[:2]):
        assert "No rank is clearly the slowest" in shown(
            {0: steps_of(0, waits), 1: steps_of(1, others)}
        )
    assert "Slowest: rank 0" in shown({0: steps_of(0, waits), 1: steps_of(1, [600.0] * 8)})


def test_a_report_fits_80_columns():
    text = shown({rank: steps_of(rank, [100.0] * 8) for rank in (0, 127)})
    assert max(map(len, text.splitlines())) <= 80
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["127"])
    numbers = "127 8 1000.0 100.0 400.0 1.00 1.00 10.00 10.00 10.00 75 %"
    assert row == numbers.split()


def test_bars_say_what_the_table_says():
    steps = steps_of(0, [100.0, 900.0, 200.0, 300.0])  # medians of parts do not add up to a step
    computing, hidden, waiting = trace_report._parts(steps)
    assert (computing + hidden + waiting, waiting) == (1000.0, 250.0)


def test_a_trace_without_steps_says_so(tmp_path, capsys):
    write(tmp_path / "t.json", [span("submit", "once", 0.0, 1.0)])
    assert cli.main(["trace", "report", str(tmp_path / "t.json")]) == 1
    assert "no tensor comes twice" in capsys.readouterr().err
