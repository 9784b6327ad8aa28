# SPDX-License-Identifier: Apache-2.0
"""program.py PLAN: one rank of a job to which things happen; it tells `run` where it is.

PLAN is JSON: `folder` has the socket `line`, to which each message goes, and files `past-N`, which
say that what should happen at step N has happened; `elements` is the length of the weights, `holds`
has the steps at which ranks work without progress until then, `elastic` says whether training
survives errors, and `first` has the first rank of each host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

import farandole as fd
import farandole.elastic
from farandole.start.launchers import launched_rank
from schedules.training import BATCH, STEPS, batches, begin, digest, gradient, moved

PLAN: dict[str, Any] = json.loads(sys.argv[1])
FOLDER = Path(PLAN["folder"])
ELEMENTS: int = PLAN["elements"]


class _Line:
    """Tells the test what this rank does; the kernel adds the process's number."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(str(FOLDER / "line"))
        rank = os.environ.get("FARANDOLE_RANK")
        self._rank = launched_rank() if rank is None else int(rank)  # by the launcher's count
        if PLAN["elastic"]:  # its place: the process after it gets the same one
            self._rank = PLAN["first"].get(socket.gethostname(), 0) + int(os.environ["LOCAL_RANK"])

    def tell(self, what: str, **words: object) -> None:
        """One message."""
        self._socket.send(json.dumps({"rank": self._rank, "what": what, **words}).encode())


def hang(*_: object) -> None:
    """What a rank does that never comes back."""
    while True:
        pass


def hold(line: _Line, step: int) -> None:
    """Tells the step; at some steps all ranks work on until the schedule lets them go on."""
    line.tell("step", step=step)
    values = np.arange(ELEMENTS, dtype=np.float64)
    while step in PLAN["holds"]:
        waits = np.array([not (FOLDER / f"past-{step}").exists()], np.uint8)
        if not fd.allreduce(waits, op=fd.Max, name="waits")[0]:
            return
        total = fd.allreduce(values * (fd.rank() + 1), op=fd.Sum, name="work")
        assert (total == values * (fd.size() * (fd.size() + 1) // 2)).all(), "a wrong sum"


def make_step(state: Any) -> None:
    """One step of the training; any number of ranks makes the same one."""
    batch = batches()[state.steps]
    mine = np.array(batch[fd.rank() :: fd.size()], np.int64)
    total = fd.allreduce(gradient(state.weights, mine), op=fd.Sum, name="gradient")
    counted = sorted(fd.allgather(mine, name="mine").tolist())
    assert len(counted) == BATCH, counted
    state.seen = [*state.seen, *counted]
    state.weights = moved(state.weights, total)
    state.steps += 1


def main() -> None:
    """Trains, and tells how it ends."""
    line = _Line()
    signal.signal(signal.SIGUSR2, hang)
    line.tell("begin")
    fd.init()
    state: Any = farandole.elastic.ObjectState(steps=0, seen=[], weights=begin(ELEMENTS))

    def train(state: Any) -> None:
        while state.steps < STEPS:
            hold(line, state.steps)
            make_step(state)
            if PLAN["elastic"]:
                state.commit()
        hold(line, STEPS)

    (farandole.elastic.run(train) if PLAN["elastic"] else train)(state)
    line.tell("done", size=fd.size(), digest=digest(state.weights), seen=state.seen)
    fd.shutdown()
    line.tell("end")


def _named(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "text": str(error)}


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        _Line().tell("error", typed=isinstance(error, fd.FarandoleError), **_named(error))
        raise
