# SPDX-License-Identifier: Apache-2.0
"""The files for Slurm and Kubernetes: shellcheck, published schemas, and what they start, started
here.

Pods, JobSets and TrainJobs are held against the models that Kubeflow publishes with its API
(PyPI's kubeflow-trainer-api). There is none for MPIJob v2beta1: FIELDS lists by hand those fields
of the operator's types.go (pkg/apis/kubeflow/v2beta1) that a job may have.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from farandole.launch.job import parse_hostfile
from farandole.tools import cli
from harness.process import Process
from harness.worlds import WORLDS, ends

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").iterdir())
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in sorted((EXAMPLES / "kubernetes").iterdir())
    for document in yaml.safe_load_all(path.read_text())
]

# Name: the type, the values, or the fields below it; "pod": a pod's template.
FIELDS: dict[str, Any] = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "sshAuthMountPath": str,
    "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
    "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
    "runPolicy": {
        "cleanPodPolicy": {"None", "Running", "All"},
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "suspend": bool,
    },
    "mpiReplicaSpecs": {
        role: {"replicas": int, "restartPolicy": {"Never", "OnFailure"}, "template": "pod"}
        for role in ("Launcher", "Worker")
    },
}


def check_fields(value: Any, fields: Any, where: str) -> None:
    if fields == "pod":
        check_model(models.IoK8sApiCoreV1PodTemplateSpec, value)
    elif isinstance(fields, set):
        assert value in fields, f"{where}: {value}"
    elif isinstance(fields, type):
        assert type(value) is fields, f"{where}: {value}"
    else:
        assert isinstance(value, dict), where
        for name, inner in value.items():
            assert name in fields, f"{where} has no {name}"
            check_fields(inner, fields[name], f"{where}.{name}")


def check_model(model: Any, value: dict[str, Any]) -> None:
    """Types are checked by the model; names that it does not know get lost in it."""
    assert model.from_dict(value).to_dict() == value


@pytest.mark.parametrize("document", DOCUMENTS)
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    kind = document["kind"]
    if kind == "MPIJob":
        assert document["apiVersion"] == "kubeflow.org/v2beta1"
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        check_fields(document["spec"], FIELDS, "spec")
        assert document["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    else:
        prefixes = {"v1": "IoK8sApiCoreV1", "batch/v1": "IoK8sApiBatchV1"}
        prefix = prefixes.get(document["apiVersion"], "TrainerV1alpha1")
        check_model(getattr(models, prefix + kind), document)


def commands() -> Iterator[Any]:
    for parameter in DOCUMENTS:
        document = parameter.values[0]
        if document["kind"] == "MPIJob":
            replicas = document["spec"]["mpiReplicaSpecs"]
            yield pytest.param(
                replicas["Launcher"]["template"]["spec"]["containers"][0], id=parameter.id
            )
        elif document["kind"] == "TrainJob":
            yield pytest.param(document["spec"]["trainer"], id=parameter.id)


@pytest.mark.parametrize("container", list(commands()))
def test_the_containers_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], container: dict[str, Any]
) -> None:
    """As the container has it, with paths of this machine: it composes a launcher's command."""
    (tmp_path / "hostfile").write_text("digits-worker-0.digits.default.svc slots=2\n" * 2)
    words = [w.replace("/etc/mpi", str(tmp_path)) for w in container["command"] + container["args"]]
    assert len(parse_hostfile(tmp_path / "hostfile")) == 2
    assert words[:2] == ["farandole", "run"]
    assert cli.main(["run", "--dry-run", *words[2:]]) == 0
    shown = capsys.readouterr().out
    assert ("--host digits-worker-0" in shown) == ("--hostfile" in words)
    assert shown.rstrip().endswith(shlex.join(words[words.index("--") + 1 :]))


# ---- Slurm


def test_shellcheck() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Batch:
    """A batch script in an allocation of this machine alone, without Slurm's commands but fakes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "venv/bin").mkdir(parents=True)
        (folder / "venv/bin/activate").touch()
        (folder / "train.py").write_text(
            WORLDS + "def event(state):\n"
            "    if state.steps == 4 and first('held'):\n"
            "        print('holds', flush=True)\n"
            "    while state.steps == 4 and os.environ.get('HOLDS'): state.check_host_updates()\n"
            "main()\n"
        )
        self.fake("scontrol", f'echo "$@" >> {folder}/scontrol.log')
        # It has no pmix: mpirun is taken. Agents it starts.
        agent = 'while [ "${1#-}" != "$1" ]; do shift; done; "$@"; exit'
        self.fake("srun", f'[ "$1" = --mpi=list ] && exit 1; echo "$@" >> srun.log; {agent}')

    def fake(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(self, script: str, **env: str) -> Process:
        environment = {
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VENV": str(self.folder / "venv"),
            "TRAIN": str(self.folder / "train.py"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_SUBMIT_DIR": str(self.folder),
            **env,
        }
        return Process(["bash", str(EXAMPLES / "slurm" / script)], environment)


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.chdir(tmp_path)
    return Batch(tmp_path)


def test_a_batch_script_trains(batch: Batch) -> None:
    with batch.start("train.sbatch") as process:
        assert ends(process.end().check().out).keys() == {0, 1}


@pytest.mark.parametrize(
    ("script", "requeued"), [("elastic.sbatch", ""), ("requeue.sbatch", "requeue 7\n")]
)
def test_a_batch_script_that_is_out_of_time(batch: Batch, script: str, requeued: str) -> None:
    """USR1 to the batch shell, as --signal=B:USR1@120 sends it; the next run ends well."""
    log = batch.folder / "scontrol.log"
    log.touch()
    with batch.start(script, HOLDS="1") as process:
        process.wait_for_output("holds")
        process.signal(signal.SIGUSR1)
        result = process.end()
        assert result.returncode == 75, result.out
    with batch.start(script) as again:
        out = again.end().check().out
    assert out.count("reset on") == 2, "it continues from the commit"
    assert ends(out).keys() == {0, 1}
    assert log.read_text() == requeued
