# SPDX-License-Identifier: Apache-2.0
"""`farandole doctor`: a healthy machine passes, and what is wrong is found."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from farandole.installed import LoadedMpi
from farandole.tools import cli, doctor, doctor_checks, doctor_hosts
from farandole.tools.doctor_checks import Level
from harness.mpirun import mpirun
from harness.process import ended

DOCTOR = [sys.executable, "-m", "farandole", "doctor"]


@pytest.fixture(autouse=True)
def _own_mpirun(monkeypatch):
    """Ahead of one that the system may have of another MPI, which doctor would call an error."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def test_this_machine_passes():
    done = ended(DOCTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, text = done.stdout.partition("in order: ")
    passed, _, totals = " ".join(text.split()).partition(" (--all shows each) ")
    for what in ("MPI", "network", "torch", "shared memory", "cgroup memory", "self test, CPU"):
        assert what in passed
    assert "0 errors" in totals


def test_ranks_test_every_backend_together():
    result = mpirun([*DOCTOR, "--all"], 2, timeout=60).check()
    assert result.out.count("errors,") == 1  # one list, by rank 0
    assert "all collectives right on 2 ranks" in result.out


def test_a_finding_of_one_rank_names_it():
    source = """
    import os, resource, sys
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    from farandole.tools.cli import main
    sys.exit(main(["doctor"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    result = mpirun(command, 2, timeout=60).check()
    assert result.out.count("errors,") == 1
    assert "rank 1: at most 200" in result.out


def test_too_few_files_and_one_core():
    source = """
    import os, resource, sys
    del os.pidfd_open, os.memfd_create  # a Python that was built for an old Linux lacks them
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from farandole.tools.cli import main
    sys.exit(main(["doctor"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = ended(command, FARANDOLE_STACK_SIGNAL="0")
    assert done.returncode == 0, done.stderr  # warnings only
    assert "at most 200" in done.stdout
    assert "ulimit -n 200" in done.stdout
    assert "no Python stacks" in done.stdout
    assert "not available" not in done.stdout
    assert "memfd:" not in done.stdout
    if (os.cpu_count() or 1) > 1:
        assert "mpirun --bind-to none" in done.stdout


def test_what_is_wrong_comes_first_and_the_rest_is_folded(monkeypatch, capsys):
    found = [
        doctor_checks.ok("fine", "nothing to say"),
        doctor_checks.warning("slow", "a warning", "remedy of the warning"),
        doctor_checks.error("broken", "an error", "remedy of the error"),
        doctor_checks.ok("sound", "nothing to say either"),
    ]
    monkeypatch.setattr(doctor, "CHECKS", [lambda: found])
    monkeypatch.setattr(doctor, "BACKENDS", [])
    assert cli.main(["doctor"]) == 1
    folded = capsys.readouterr().out
    places = [folded.index(x) for x in ("broken", "slow", "in order: fine; sound (--all")]
    assert places == sorted(places)
    assert "nothing to say" not in folded
    assert cli.main(["doctor", "--all"]) == 1
    whole = capsys.readouterr().out
    places = [whole.index(x) for x in ("broken", "slow", "nothing to say", "nothing to say either")]
    assert places == sorted(places)
    assert "in order" not in whole


def findings(check):
    return {finding.name: finding for finding in check()}


@pytest.mark.parametrize(
    ("versions", "name", "level"),
    [
        ({"torch": "1.13.0"}, "torch", Level.ERROR),
        ({"torch": "2.1.0", "numpy": "2.0.0"}, "numpy", Level.WARNING),
        ({"torch": "2.13.0+cpu", "numpy": "2.4.6"}, "numpy", Level.OK),
        ({"torch": ""}, "torch", Level.OK),
        ({"torch": "2.13.0+rocm6.4", "numpy": "2.4.6"}, "torch", Level.WARNING),
    ],
)
def test_known_bad_versions(monkeypatch, versions, name, level):
    monkeypatch.setattr(doctor_checks, "_version", lambda package: versions.get(package, "1.26"))
    finding = findings(doctor_checks._torch)[name]
    assert finding.level is level
    assert bool(finding.remedy) == (level is not Level.OK)


OPEN_MPI = "Open MPI v5.0.11, package: x"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.29"


@pytest.mark.parametrize(
    ("launcher", "library", "level"),
    [
        ("mpirun (Open MPI) 5.0.11", OPEN_MPI, Level.OK),
        ("mpirun (Open MPI) 4.1.4", OPEN_MPI, Level.ERROR),
        ("mpirun (Open MPI) 5.0.11", "MPICH Version: 5.0.2", Level.ERROR),
        ("mpirun (Open MPI) 5.0.11", CRAY, Level.ERROR),
        ("HYDRA build details:\n Version: 5.0.2", OPEN_MPI, Level.ERROR),
        ("HYDRA build details:\n Version: 5.0.2", "MPICH Version: 5.0.2", Level.OK),
        ("PALS 1.2.12", CRAY, Level.OK),
        ("something 3.4", CRAY, Level.OK),  # nothing is known of it
    ],
)
def test_launcher_and_library_belong_together(tmp_path, monkeypatch, launcher, library, level):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{launcher}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (finding,) = doctor_hosts._mpirun(library)
    assert finding.level is level, finding
    said = "is from Open MPI 4.1.4, but" if "4.1.4" in launcher else "world of one"
    assert (said in finding.text) == (level is Level.ERROR)
    assert bool(finding.remedy) == (level is Level.ERROR)


def test_the_mpi_that_is_loaded_is_shown_with_its_file():
    finding = findings(doctor_hosts._mpi)["MPI"]
    assert finding.level is Level.OK
    family, version, interface, file = finding.text.replace(": ", "; ", 1).split("; ")
    assert family in version
    assert interface == f"{family}'s binary interface"
    mapped = Path("/proc/self/maps").read_text()
    assert file in mapped


def test_an_mpi_without_a_known_interface_is_a_warning(monkeypatch):
    mpi = LoadedMpi("/opt/other/libmpi.so.1", "", "Other MPI 1.0")
    monkeypatch.setattr(doctor_hosts, "loaded_mpi", lambda: mpi)
    finding = doctor_hosts._library("Other MPI 1.0")
    assert finding.level is Level.WARNING
    assert "/opt/other/libmpi.so.1" in finding.text
    assert "FARANDOLE_WIRE=tcp" in finding.remedy


@pytest.mark.parametrize(
    ("speed", "said"),
    [("100000", "100 Gbit/s"), ("2500", "2.5 Gbit/s"), ("-1", "unknown"), ("", "unknown")],
)
def test_interfaces_and_their_speed(monkeypatch, speed, said):
    monkeypatch.setattr(doctor_hosts, "addresses", lambda: [("ib0", "10.0.0.7")])
    monkeypatch.setattr(
        doctor_hosts, "read", lambda path: speed if path == "/sys/class/net/ib0/speed" else "?"
    )
    (finding,) = doctor_hosts._network()
    assert finding.level is Level.OK
    assert finding.text.startswith("all interfaces: ib0 10.0.0.7, ")
    assert finding.text.endswith(said)


def test_the_interfaces_are_those_that_the_core_takes(monkeypatch):
    def named(value):
        monkeypatch.setenv("FARANDOLE_INTERFACE", value)
        (finding,) = doctor_hosts._network()
        return finding

    assert named("").text.startswith("all interfaces: ")
    assert named("=lo").text == "FARANDOLE_INTERFACE==lo: only loopback"
    missing = named("=no-such-interface")
    assert missing.level is Level.ERROR
    assert "selects no network interface of this host" in missing.text


@pytest.mark.parametrize(
    ("library", "kind", "level"),
    [
        (OPEN_MPI, "pmi2", Level.WARNING),
        (OPEN_MPI, "pmix_v4", Level.OK),
        ("MPICH Version: 5.0.2", "pmi2", Level.OK),
        ("MPICH Version: 5.0.2", "pmix", Level.WARNING),
        (CRAY, "cray_shasta", Level.OK),
    ],
)
def test_slurm(monkeypatch, library, kind, level):
    monkeypatch.setattr(doctor_hosts, "mpi_library", lambda: library)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_MPI_TYPE", kind)
    assert [finding.level for finding in doctor_hosts._launcher()] == [level]


@pytest.mark.parametrize(("used", "level"), [(1 << 20, Level.OK), (999 << 20, Level.WARNING)])
def test_a_full_cgroup(monkeypatch, used, level):
    values = {"memory.max": str(1000 << 20), "memory.current": str(used)}
    monkeypatch.setattr(doctor_checks, "read", lambda path: values.get(path.rsplit("/")[-1], ""))
    assert [finding.level for finding in doctor_checks._memory()] == [level]


@pytest.mark.parametrize(
    ("quota", "found"),
    [
        ("max 100000", []),
        ("150000 100000", [(Level.WARNING, "the cgroup grants 1.5 cores to 2 ranks")]),
        ("200000 100000", [(Level.OK, "2 cores")]),
    ],
)
def test_a_quota_of_cpu_time(monkeypatch, quota, found):
    monkeypatch.setattr(doctor_checks, "read", lambda path: quota if "cpu.max" in path else "")
    for name, value in {"SIZE": "2", "RANK": "0", "LOCAL_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    of_quota = [finding for finding in doctor_checks._cores() if finding.name == "CPU quota"]
    assert [(finding.level, finding.text) for finding in of_quota] == found


def test_worlds_of_one_are_explained():
    done = ended(DOCTOR, OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 1
    assert "error" in done.stdout
    assert "MPI says 1" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("cores", "mine", "ranks", "told"),
    [
        (2, 2, 4, "4 ranks share 2 cores"),
        (2, 2, 2, "2 of 2 usable"),
        (2, 1, 2, "1 of 2 usable"),  # bound, each to its own
        (8, 1, 2, "all threads of this process are bound to one core of 8"),
        (8, 4, 2, "4 of 8 usable"),
    ],
)
@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "9", "OMPI_COMM_WORLD_LOCAL_SIZE": "{}"},
        {"WORLD_SIZE": "9", "RANK": "0", "LOCAL_WORLD_SIZE": "{}"},
        {"SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "{}"},
        {"PMI_SIZE": "9", "PMI_RANK": "0", "MPI_LOCALNRANKS": "{}"},
    ],
    ids=["Open MPI", "torchrun", "srun", "MPICH"],
)
def test_ranks_that_share_cores_are_counted_under_every_launcher(
    monkeypatch, variables, cores, mine, ranks, told
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(ranks))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mine)))
    assert next(doctor_checks._cores()).text == told
