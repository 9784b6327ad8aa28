# SPDX-License-Identifier: Apache-2.0
"""`farandole run`: what it composes for each launcher; the one of this machine starts it."""

import ast
import contextlib
import dataclasses
import fcntl
import os
import shlex
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from farandole.launch.commands import Hydra, IntelMpi, OpenMpi, Srun, find
from farandole.launch.job import Host, Job, outer_environment, parse_hostfile, parse_hosts
from farandole.tools import cli
from harness.process import PATIENCE, SLOWNESS

FIVE, FOUR = OpenMpi("mpirun", (5, 0, 11)), OpenMpi("mpirun", (4, 1, 4))
TWO_HOSTS = (Host("a", 4), Host("b", 4))
PLAIN = Job(command=("python", "x.py"), ranks=2)
FAR = Job(command=("python", "x.py"), ranks=8, hosts=TWO_HOSTS, forwarded=("DATA",))


@pytest.fixture(autouse=True)
def _as_user_outside_a_job(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def words(launcher, job):
    """The command without the shell that tells each rank its place."""
    line = launcher.command(job)
    at = line.index("sh")
    assert line[at + 1] == "-c"
    assert line[at + 3] == "rank"
    return " ".join(line[:at] + line[at + 4 :])


@pytest.mark.parametrize(
    "launcher", [FIVE, FOUR, Hydra("mpiexec")], ids=["open mpi 5", "open mpi 4", "hydra"]
)
def test_the_jobs_secret_does_not_go_by_mpi(launcher, monkeypatch):
    """Unless the user names it: whoever reads MPI's messages would read it."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", "a secret of the job's own")
    monkeypatch.setenv("FARANDOLE_LOG_LEVEL", "info")
    assert "FARANDOLE_JOB_SECRET" not in words(launcher, FAR)
    assert "FARANDOLE_JOB_SECRET" not in launcher.environment(FAR)
    assert launcher.environment(FAR)["FARANDOLE_LOG_LEVEL"] == "info"
    assert "FARANDOLE_JOB_SECRET" in launcher.environment(PLAIN), "it does not leave this host"
    named = dataclasses.replace(FAR, forwarded=("FARANDOLE_JOB_SECRET",))
    assert "FARANDOLE_JOB_SECRET" in launcher.environment(named)
    assert "FARANDOLE_JOB_SECRET" in Srun("srun", "pmix").environment(FAR)


@pytest.mark.parametrize("given", [None, "", ":", "/a:", ":/a", "/a::/b"])
def test_no_search_path_has_an_empty_part(given, monkeypatch):
    """It means the working folder, where a stranger may have left a library. Open MPI's daemons on
    other hosts make one out of an empty variable."""
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    parts = [part for part in (given or "").split(":") if part]
    for job in (PLAIN, FAR):
        found = FIVE.environment(job)
        assert found.get("PYTHONPATH", "").split(":") == (parts or [""])
        libraries = found.get("LD_LIBRARY_PATH")
        if parts:
            assert libraries.split(":") == parts
        else:
            assert libraries is None or (job is FAR and "" not in libraries.split(":"))
    for launcher in (FIVE, FOUR):
        assert "-x LD_LIBRARY_PATH" in words(launcher, FAR)
        assert launcher.environment(FAR)["LD_LIBRARY_PATH"]


def test_one_machine():
    assert (
        words(FIVE, PLAIN) == "mpirun -np 2 --map-by :OVERSUBSCRIBE --bind-to none python x.py"
    ), "no -x: ranks here inherit"
    assert words(FOUR, PLAIN) == "mpirun -np 2 --oversubscribe --bind-to none python x.py"
    assert words(Hydra("mpiexec"), PLAIN) == "mpiexec -np 2 -bind-to none python x.py"
    assert (
        words(Srun("srun", "pmix"), PLAIN)
        == "srun --ntasks=2 --mpi=pmix --export=ALL --cpu-bind=none python x.py"
    )


def test_intels_library_pins_no_rank_unless_it_is_asked_to(monkeypatch):
    off = "-bind-to none -genv I_MPI_PIN off python x.py"
    assert words(IntelMpi("mpiexec"), PLAIN) == f"mpiexec -np 2 {off}"
    bound = dataclasses.replace(PLAIN, binding=["-bind-to", "core"])
    assert "I_MPI_PIN" not in words(IntelMpi("mpiexec"), bound)
    named = dataclasses.replace(PLAIN, environment={"I_MPI_PIN_DOMAIN": "socket"})
    assert "I_MPI_PIN off" not in words(IntelMpi("mpiexec"), named)
    given = dataclasses.replace(PLAIN, extra=("-genv", "I_MPI_PIN_DOMAIN", "socket"))
    assert "I_MPI_PIN off" not in words(IntelMpi("mpiexec"), given)
    monkeypatch.setenv("I_MPI_PIN_DOMAIN", "socket")
    assert "I_MPI_PIN" not in words(IntelMpi("mpiexec"), PLAIN)


def test_more_ranks_than_cores_yield():
    crowd = Job(command=("x",), ranks=len(os.sched_getaffinity(0)) + 1)
    assert "--mca mpi_yield_when_idle 1" in words(FIVE, crowd)
    assert "yield" not in words(FIVE, Job(command=("x",), ranks=1))


def test_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in words(FIVE, PLAIN)
    assert "root" not in words(Hydra("mpiexec"), PLAIN)


def test_hosts_and_environment(monkeypatch):
    monkeypatch.setenv("FARANDOLE_LOG_LEVEL", "info")
    monkeypatch.setenv("UNRELATED", "1")
    for launcher in (FIVE, FOUR):
        line = words(launcher, FAR)
        for part in ("--host a:4,b:4", "-x DATA", "-x FARANDOLE_LOG_LEVEL", "-x PATH"):
            assert part in line
        assert "UNRELATED" not in line
        assert "versubscribe" not in line.lower()
    assert "-hosts a:4,b:4" in words(Hydra("mpiexec"), FAR)
    line = words(Srun("srun", "pmix"), FAR)
    assert "--nodes=2 --ntasks-per-node=4 --nodelist=a,b" in line


def test_more_ranks_than_slots_are_refused():
    job = Job(command=("x",), ranks=9, hosts=TWO_HOSTS)
    for launcher in (FIVE, Hydra("mpiexec"), Srun("srun", "pmix")):
        with pytest.raises(ValueError, match="9 ranks need more than 8 slots"):
            launcher.command(job)
    crowd = Job(command=("x",), ranks=9, hosts=TWO_HOSTS, oversubscribe=True)
    assert ":OVERSUBSCRIBE" in words(FIVE, crowd)


def test_output_and_network():
    job = Job(
        command=("x",),
        ranks=2,
        hosts=(Host("a", 2),),
        tag=True,
        timestamp=True,
        output="log",
        interfaces="eth0,ib0",
        ssh_port=2222,
        ssh_identity="key",
        binding=("--bind-to", "socket"),
        extra=("--mca", "smsc", "^cma"),
    )
    five, four = words(FIVE, job), words(FOUR, job)
    assert "--output tag,timestamp,file=log" in five
    assert "--tag-output --timestamp-output --output-filename log" in four
    assert "--prtemca plm_ssh_args -p 2222 -i key" in five
    assert "--mca plm_rsh_args -p 2222 -i key" in four
    for line in (five, four):
        assert "--mca btl_tcp_if_include eth0,ib0" in line
        assert "--bind-to socket" in line
        assert line.endswith("--mca smsc ^cma x")
    with pytest.raises(ValueError, match="time stamps"):
        Hydra("mpiexec").command(job)


def test_hosts_are_read(tmp_path):
    for option in ("-oProxyCommand=x", "-a:2", "b,-c"):  # ssh and mpirun would obey it
        with pytest.raises(ValueError, match="is not a host"):
            parse_hosts(option)
    assert parse_hosts("a:4,b") == (Host("a", 4), Host("b", 1))
    path = tmp_path / "hosts"
    path.write_text("# machines\na slots=4\nb:2  # old\n\nc slots=3 max_slots=3\nd\n")
    assert parse_hostfile(path) == (Host("a", 4), Host("b", 2), Host("c", 3), Host("d", 1))
    for wrong in ("a:0", "a:x", "a b", ":3"):
        with pytest.raises(ValueError, match="is not a host"):
            parse_hosts(wrong)
    path.write_text("a slots=many\n")
    with pytest.raises(ValueError, match="slots=many"):
        parse_hostfile(path)


def test_a_launcher_does_not_see_that_a_rank_started_it(monkeypatch):
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_FD", "FARANDOLE_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("PMIX_MCA_gds", "OMPI_MCA_smsc", "FARANDOLE_RANK_X"):
        monkeypatch.setenv(name, "1")
    seen = outer_environment(Job(command=("x",), ranks=1, environment={"NEW": "2"}))
    assert not {"PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_FD", "FARANDOLE_RANK"} & set(seen)
    assert {"PMIX_MCA_gds", "OMPI_MCA_smsc", "NEW", "FARANDOLE_RANK_X"} <= set(seen)


# ---- what each rank is told

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


def told(launcher, job, variables):
    """What a rank of that launcher sees, whose own variables are these."""
    line = launcher.command(job)
    show = [sys.executable, "-c", "import os; print(dict(os.environ))"]
    shell = [*line[line.index("sh") :][:4], *show]
    done = subprocess.run(shell, env={"PATH": os.environ["PATH"], **variables}, capture_output=True)
    seen = ast.literal_eval(done.stdout.decode())
    return [seen[name] for name in PLACE]


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        (
            FIVE,
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
        ),
        (
            Hydra("mpiexec"),
            {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        ),
        (Srun("srun", "pmix"), {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}),
        (Srun("srun", "pmix"), {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}),
    ],
)
def test_each_rank_is_told_its_place_by_torchruns_names(launcher, variables, monkeypatch):
    *place, port = told(launcher, FAR, {**variables, "RANK": "77"})
    assert place == ["5", "8", "1", "4", "a"]
    assert 1024 <= int(port) < 65536
    monkeypatch.setenv("MASTER_PORT", "29511")  # the user's own
    assert told(launcher, FAR, variables)[-2:] == ["a", "29511"]
    monkeypatch.setenv("RANK", "0")  # the variables of a rank that starts a job
    assert told(launcher, FAR, variables)[-1] != "29511"
    assert "MASTER_PORT" not in outer_environment(FAR)
    assert "RANK" not in outer_environment(FAR)
    assert told(launcher, PLAIN, variables)[4] == "localhost"


def test_tasks_that_differ_by_node_give_no_wrong_number():
    uneven = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)"}
    assert told(Srun("srun", "pmix"), FAR, uneven)[:4] == ["5", "8", "1", ""]


@pytest.mark.parametrize(
    ("variable", "value", "first"),
    [
        ("SLURM_JOB_NODELIST", "rack[04-07,9]n,other", "rack04n"),
        ("SLURM_JOB_NODELIST", "gpu-7,gpu-9", "gpu-7"),
        ("LSB_HOSTS", "h3 h3 h4", "h3"),
    ],
)
def test_rank_0_is_on_the_first_host_of_an_allocation(variable, value, first, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID" if "SLURM" in variable else "LSB_JOBID", "7")
    monkeypatch.setenv(variable, value)
    assert told(FIVE, PLAIN, {})[4] == first


def test_slurm_starts_in_the_order_of_its_nodes():
    job = Job(command=("x",), ranks=2, hosts=(Host("n10", 1), Host("n9", 1)))
    assert told(Srun("srun", "pmix"), job, SLURM)[4] == "n9"
    assert told(FIVE, job, {})[4] == "n10"


def test_several_programs_are_left_to_the_launcher():
    several = Job(command=("python", "a.py", ":", "-np", "2", "python", "b.py"), ranks=2)
    assert "sh" not in FIVE.command(several)


# ---- which launcher


def program(folder, name, says):
    """A launcher that is not installed here, as far as find() asks it."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "kind", "name"),
    [
        ("mpirun (Open MPI) 4.1.4", OpenMpi, "Open MPI 4.1.4"),
        ("mpirun (Open MPI) 5.0.11", OpenMpi, "Open MPI 5.0.11"),
        ("HYDRA build details:", Hydra, "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.19.0", IntelMpi, "Intel MPI"),
    ],
)
def test_launchers_are_told_apart(tmp_path, says, kind, name):
    found = find(program(tmp_path, "mpirun", says))
    assert isinstance(found, kind)
    assert found.name == name


def test_an_unknown_launcher_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"is not a launcher that `farandole run` knows .*: 'Other 1\.0'"
    ):
        find(program(tmp_path, "mpirun", "Other 1.0"))
    with pytest.raises(ValueError, match=r"no nosuchrun here; remedy"):
        find("nosuchrun")


# ---- the command


def farandole_run(*arguments, **env):
    line = [str(Path(sys.executable).with_name("farandole")), "run", *arguments]
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    return subprocess.run(
        line, env=plain | env, capture_output=True, text=True, timeout=100 * SLOWNESS
    )


def test_it_starts_ranks_here(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import sys, farandole as fd\n"
        "fd.init()\n"
        "v = {v.name: v.value for v in fd.config()}\n"
        "print(fd.rank(), 'of', fd.size(), v['FARANDOLE_FUSION_THRESHOLD'], *sys.argv[1:])\n"
    )
    done = farandole_run(
        *("-np", "3", "--fusion-threshold-mb", "8", sys.executable, str(path), "--np", "9")
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} of 3 8388608 --np 9" for r in range(3)]


def test_its_exit_code_is_that_of_the_job():
    assert farandole_run("-np", "2", "sh", "-c", "exit 3").returncode == 3


def test_ctrl_c_says_what_it_does(tmp_path):
    """In a terminal; it says so once, and nothing is left of the process that says it."""
    path = tmp_path / "x.py"
    path.write_text(
        "import numpy as np, farandole as fd\n"
        "fd.init()\n"
        "fd.barrier()\n"
        "print('up', flush=True)\n"
        "while True: fd.allreduce(np.full(3, fd.rank()), name='x')\n"
    )
    ours, theirs = os.openpty()
    job = subprocess.Popen(
        [Path(sys.executable).with_name("farandole"), "run", "-np", "2", sys.executable, path],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    out = b""
    with contextlib.suppress(OSError):  # EIO: the last process that had the terminal has ended
        while part := os.read(ours, 1 << 16):
            was, out = out.count(b"up"), out + part
            if was < 2 <= out.count(b"up"):
                os.write(ours, b"\x03")
    os.close(ours)
    assert job.wait(PATIENCE) != 0
    assert out.count(b"farandole run: Ctrl-C: ") == 1, out
    assert b" ends all ranks" in out


def test_a_dry_run_shows_what_would_run(capsys):
    line = ["run", "-np", "2", "--dry-run", "--log-level", "info", "-x", "A=b c", "python", "x.py"]
    assert cli.main(line) == 0
    shown = shlex.split(capsys.readouterr().out)
    assert shown[:3] == ["env", "A=b c", "FARANDOLE_LOG_LEVEL=info"]
    assert shown[3].endswith("mpirun")
    assert shown[-2:] == ["python", "x.py"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-np", "2"], "no command"),
        (["python", "x.py"], "number of ranks"),
        (["-H", "a:x", "python", "x.py"], "'a:x' is not a host"),
        (["-np", "2", "--launcher", "/nowhere/mpirun", "true"], "no /nowhere/mpirun here"),
        (["-np", "2", "--launcher", "slurm", "true"], "for Slurm pass --launcher srun"),
        (["-np", "2", "train.py"], "did you mean `farandole run -np 2 python train.py`?"),
        (["-np", "2", "nosuchprogram"], "nosuchprogram is not a program that can be started"),
    ],
)
def test_what_is_missing_is_said(arguments, says, capsys):
    assert cli.main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_executable(tmp_path, monkeypatch, capsys):
    (tmp_path / "train").write_text("#!/bin/sh")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "-np", "2", "train"]) == 2
    assert "did you mean ./train, or chmod +x?" in capsys.readouterr().err


def test_switches_of_horovodrun_are_settings(capsys):
    line = ["run", "-np", "2", "--dry-run", "--timeline-mark-cycles", "--no-stall-check", "true"]
    assert cli.main(line) == 0
    shown = shlex.split(capsys.readouterr().out)
    switches = ("STALL_ABORT=0", "STALL_WARN=0", "TIMELINE_MARK_CYCLES=1")
    assert shown[1:4] == [f"FARANDOLE_{switch}" for switch in switches]


@pytest.mark.parametrize(
    "option", ["--cycle-time-ms=3", "--jsrun", "--reset-limit=2", "--autotune"]
)
def test_options_without_a_meaning_say_why(option, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "-np", "2", option, "python", "x.py"])
    assert caught.value.code == 2
    assert (
        f"farandole does not take horovodrun's {option.partition('=')[0]}: "
        in capsys.readouterr().err
    )
