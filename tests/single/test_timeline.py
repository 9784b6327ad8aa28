# SPDX-License-Identifier: Apache-2.0
"""Timelines where no job is needed: settings, and files cut short."""

import json
import os
import subprocess
import sys

import pytest

import farandole as fd
from farandole.observe import trace

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
