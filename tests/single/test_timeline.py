# SPDX-License-Identifier: Apache-2.0
"""Timelines where no job is needed: settings."""

import json
import os
import subprocess
import sys

import pytest

import farandole as fd


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
    events = json.loads(path.read_text())
    assert [e["name"] for e in events if e.get("cat") == "submit"] == ["loss", "loss"]
