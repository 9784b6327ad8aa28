# SPDX-License-Identifier: Apache-2.0
"""The commands of the containers in examples/kubernetes, run on simulated hosts with the
files that the operators mount. Only paths are other ones, and what stands for ssh."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from harness.hosts import simulated_hosts
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import PATIENCE, Process

ROOT = Path(__file__).resolve().parents[2]


def containers(name: str) -> list[list[str]]:
    """The commands and arguments of the containers that start ranks, the launcher's first."""
    found = []
    for document in yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text()):
        spec = document["spec"]
        if document["kind"] == "TrainJob":
            found.append(spec["trainer"])
        elif document["kind"] == "MPIJob":
            found += spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    return [[*each["command"], *each.get("args", [])] for each in found]


@pytest.mark.parametrize("name", ["mpijob-cpu.yaml", "trainjob.yaml"])
def test_a_launchers_container(tmp_path: Path, name: str) -> None:
    with simulated_hosts(tmp_path, [2, 2]) as hosts, ExitStack() as stack:
        (tmp_path / "hostfile").write_text("".join(f"{h} slots=2\n" for h in hosts.names))
        environment = {
            **MPI_ENVIRONMENT,
            **hosts.environment(),
            "PRTE_MCA_plm_ssh_agent": hosts.mpi_args()[2],
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

        def start(command: list[str], *shell: str) -> Process:
            text = shlex.join(command)
            for there, here in (
                ("/etc/mpi", tmp_path),
                ("/tmp/digits.pt", tmp_path / "digits.pt"),
                (" examples/", f" {ROOT}/examples/"),
            ):
                text = text.replace(there, str(here))
            return stack.enter_context(Process([*shell, f"exec {text}"], environment))

        (launcher,) = containers(name)
        out = start(launcher, "sh", "-c").end(2 * PATIENCE).check().out
        accuracy = re.search(r"test accuracy (0\.\d+)", out)
        assert accuracy, out
        assert float(accuracy[1]) > 0.9
