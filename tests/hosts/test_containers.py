# SPDX-License-Identifier: Apache-2.0
"""The commands of the launchers' containers in examples/kubernetes, run on simulated hosts with the
files that the operators mount. Only paths are other ones, and what stands for ssh."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from harness.hosts import simulated_hosts
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import PATIENCE, Process

ROOT = Path(__file__).resolve().parents[2]


def container(name: str) -> list[str]:
    """The command and arguments of the launcher's container."""
    for document in yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text()):
        if document["kind"] == "MPIJob":
            template = document["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
            found = template["spec"]["containers"][0]
            return [*found["command"], *found["args"]]
        if document["kind"] == "TrainJob":
            trainer = document["spec"]["trainer"]
            return [*trainer["command"], *trainer["args"]]
    raise ValueError(name)


@pytest.mark.parametrize("name", ["mpijob-cpu.yaml", "mpijob-elastic.yaml", "trainjob.yaml"])
def test_a_launchers_container(tmp_path: Path, name: str) -> None:
    with simulated_hosts(tmp_path, [2, 2]) as hosts:
        (tmp_path / "hostfile").write_text("".join(f"{h} slots=2\n" for h in hosts.names))
        (tmp_path / "discover_hosts.sh").write_text("".join(f"echo {h}\n" for h in hosts.names))
        command = shlex.join(container(name))
        for there, here in (
            ("/etc/mpi", tmp_path),
            ("/checkpoints", tmp_path / "checkpoints"),
            ("/tmp/digits.pt", tmp_path / "digits.pt"),
            (" examples/", f" {ROOT}/examples/"),
        ):
            command = command.replace(there, str(here))
        environment = {
            **MPI_ENVIRONMENT,
            **hosts.environment(),
            "PRTE_MCA_plm_ssh_agent": hosts.mpi_args()[2],
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        process = Process(["sh", "-c", f"exec {command}"], environment)
        try:
            result = process.wait(2 * PATIENCE)
            assert result is not None, process.output
            accuracy = re.search(r"test accuracy (0\.\d+)", result.check().out)
            assert accuracy, result.out
            assert float(accuracy[1]) > 0.9
        finally:
            process.kill()
