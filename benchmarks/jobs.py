# SPDX-License-Identifier: Apache-2.0
"""Shared by benchmarks that start jobs: rows from rank 0, and simulated hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

_MARK = "row: "


def tell(row: Any) -> None:
    """Sends one row from the job. Rank 0 calls this."""
    print(_MARK + json.dumps(row), flush=True)


def rows_of(argv: Sequence[str], ranks: int, hosts: Any = None, **env: str) -> Iterator[Any]:
    """Runs a script as a job, and yields each row when it comes."""
    from harness.mpirun import MpiJob

    env = {**(hosts.environment() if hosts else {}), "OMP_NUM_THREADS": "1", **env}
    mpi_args = hosts.mpi_args() if hosts else []
    with MpiJob([sys.executable, *argv], ranks, env, mpi_args) as job:
        for line in job.process.lines():
            if line.startswith(_MARK):
                yield json.loads(line.removeprefix(_MARK))
        job.finish(30).check()


@contextlib.contextmanager
def two_hosts(rate: str, ranks: int = 1) -> Iterator[Any]:
    """Simulates two hosts of `ranks` ranks. `rate`: their link's, as tc writes it, or `none`. Needs
    root."""
    from harness.hosts import simulated_hosts, why_not

    if reason := why_not():
        sys.exit(f"simulated hosts: {reason}")
    # After `kill` and `timeout`, too, this process removes its hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_hosts(Path(folder), [ranks, ranks]) as hosts,
    ):
        if rate != "none":
            hosts.shape(rate)
        yield hosts


def sent() -> tuple[int, int]:
    """Bytes and packets that have left this host by its link."""
    folder = Path("/sys/class/net/eth0/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text())
