# SPDX-License-Identifier: Apache-2.0
"""The variables by which launchers tell each process its rank and the number of ranks.

The bootstrap, doctor and farandole.run() use them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from farandole.errors import LibraryError

# init() sets this variable in a rank's process, for the rank's children; see ancestry.py. It is not
# a setting.
RANK_PROCESS = "_FARANDOLE_RANK_PROCESS"
ALONE = "FARANDOLE_RENDEZVOUS=none makes this process a world of one, whatever other variables say"


@dataclass(frozen=True)
class LauncherVariables:
    """Names of one launcher's variables. If there are several, spaces separate them."""

    name: str
    size_variable: str
    rank_variable: str
    local_rank_variable: str = ""  # the first variable that is set counts
    local_size_variable: str = ""  # likewise; the value of Slurm's variable is a list
    marks: str = ""  # variables set only in a rank's process, and not in Slurm's batch scripts
    job: str = ""  # variables whose values identify one start of ranks
    leaves: str = ""  # pattern of variables that a rank must not pass on to launchers

    @property
    def size(self) -> int:
        """Number of processes, or 0 if the variable is unset."""
        return _number(self.size_variable)

    @property
    def rank(self) -> int:
        """Rank of this process, or -1 if the variable is unset."""
        return _number(self.rank_variable, -1)

    @property
    def place(self) -> dict[str, int]:
        """The known values of torchrun's variables that describe this process's place."""
        local_rank = max((_number(x, -1) for x in self.local_rank_variable.split()), default=-1)
        sizes = (_of_node(os.environ.get(x, "")) for x in self.local_size_variable.split())
        local_size = next(filter(None, sizes), 0)
        found = {"RANK": self.rank, "WORLD_SIZE": self.size}
        found |= {"LOCAL_RANK": local_rank} if local_rank >= 0 else {}
        found |= {"LOCAL_WORLD_SIZE": local_size} if local_size else {}
        # srun sets PMI's variables as well, but srun's own variables say more.
        same = self is not SRUN and (SRUN.size, SRUN.rank) == (self.size, self.rank)
        return SRUN.place | found if same else found

    def __str__(self) -> str:
        return f"{self.name} ({self.size_variable})"


FARANDOLE = LauncherVariables(
    *("farandole", "FARANDOLE_SIZE", "FARANDOLE_RANK"),
    marks="FARANDOLE_RENDEZVOUS FARANDOLE_AGENT",
    job="FARANDOLE_RENDEZVOUS",
    leaves="FARANDOLE_(RENDEZVOUS|RANK|SIZE|AGENT)$",
)
TORCHRUN = LauncherVariables(
    *("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    marks="RANK",
    job="MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT",
    leaves="TORCHELASTIC_|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME)$",
)
SRUN = LauncherVariables(
    *("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    *("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_STEP_ID", "SLURM_JOB_ID SLURM_STEP_ID"),
)
LAUNCHERS = (
    FARANDOLE,
    LauncherVariables(
        *("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("OMPI_COMM_WORLD_RANK PMIX_RANK", "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid"),
        r"PMIX_(?!MCA_)|OMPI_(COMM_WORLD_|FILE_|FIRST_RANKS|UNIVERSE)|PRTE_LAUNCHED",
    ),
    LauncherVariables(
        *("a PMI launcher (mpiexec, srun)", "PMI_SIZE", "PMI_RANK"),
        "MPI_LOCALRANKID PMI_LOCAL_RANK PALS_LOCAL_RANKID",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE",  # Hydra's, and PALS's
        *("PMI_RANK PMI_ID PMI_FD PMI_PORT", "PMI_JOBID PALS_APID"),
        "PMI2?_|PALS_|MPI_LOCAL|HYDI_|HYDRA_TMPDIR",
    ),
    TORCHRUN,
    SRUN,
)
_NONE = LauncherVariables("no launcher", "", "")


def names(*columns: str) -> list[str]:
    """Returns the names of all launchers' variables in these columns."""
    return [x for row in LAUNCHERS for column in columns for x in getattr(row, column).split()]


def _number(variable: str, otherwise: int = 0) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else otherwise


def _of_node(text: str) -> int:
    """Returns the number of processes on this node, or 0 if it is unknown.

    `text` is a number such as `4`, or Slurm's list for all nodes, such as `4(x2),3`.
    """
    counts: list[int] = []
    for part in text.split(","):
        if found := re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part):
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number("SLURM_NODEID") if len(counts) > 1 else 0
    return counts[node] if node < len(counts) else 0


def complete() -> None:
    """Sets torchrun's missing variables, if another launcher has started several processes.

    Does not set MASTER_ADDR and MASTER_PORT, on which all ranks must agree. If RANK or WORLD_SIZE
    contradicts the launcher, does not set any variable. check() reports the contradiction.
    """
    found = launcher()
    if found is TORCHRUN or found.size <= 1 or found.rank < 0:
        return
    if os.environ.get("FARANDOLE_RENDEZVOUS"):
        return
    place = {name: str(value) for name, value in found.place.items()}
    values = {name: os.environ.get(name, "").strip() for name in place}
    if all(values[name] in ("", place[name]) for name in ("RANK", "WORLD_SIZE")):
        os.environ.update({name: value for name, value in place.items() if not values[name]})


def launcher() -> LauncherVariables:
    """Returns the launcher of this process.

    It is torchrun if WORLD_SIZE is above 1 and MPI's launcher has started at most one process, or
    only torchrun's agents. Otherwise, it is MPI's launcher.
    """
    mpi = next((x for x in LAUNCHERS if x.size and x not in (FARANDOLE, TORCHRUN)), _NONE)
    agents = _number("GROUP_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else 0
    return TORCHRUN if TORCHRUN.size > 1 and mpi.size in (0, 1, agents) else mpi


def check() -> None:
    """Raises LibraryError if the launchers' variables show that ranks could not meet.

    This is so if torchrun's variables contradict MPI's launcher or each other, or if `accelerate
    launch` was asked for several processes but has started one.
    """
    chosen = launcher()
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    if not chosen.size and not TORCHRUN.size and "PALS_RANKID" in os.environ:
        raise LibraryError(
            "PALS started this process, but PMI_SIZE does not say how many there are. Remedy: "
            f"omit --pmi=none, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {ALONE}"
        )
    if chosen.size <= 1 and ((size.strip() and not TORCHRUN.size) or TORCHRUN.rank >= 1):
        raise LibraryError(
            f"WORLD_SIZE={size} and RANK={rank} contradict each other, so farandole can't tell how "
            "many processes there are. Remedy: start with torchrun or mpirun, or `unset WORLD_SIZE "
            f"RANK`; {ALONE}"
        )
    if chosen.size <= 1 and not size and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= {*os.environ}:
        # accelerate sets MASTER_PORT only for several processes, and starts those through MPI or
        # torchrun.
        raise LibraryError(
            "accelerate launch was asked for several processes (MASTER_PORT says so), but has "
            "started one: on CPUs it starts several only with --mpirun_hostfile. Remedy: `mpirun "
            "-np 2 --bind-to none python train.py`, or `accelerate launch --cpu --mpirun_hostfile "
            "hosts --num_processes 2 train.py` with a file that says `localhost slots=2`; for one "
            f"process --num_processes 1, and `unset MASTER_PORT`; {ALONE}"
        )
    if chosen.size <= 1 or not TORCHRUN.size:
        return
    if TORCHRUN.size != chosen.size or TORCHRUN.rank not in (-1, chosen.rank):
        raise LibraryError(
            f"{chosen} says rank {chosen.rank} of {chosen.size}, but WORLD_SIZE={TORCHRUN.size} "
            f"and RANK={rank} say otherwise. Remedy: start with one launcher "
            f"and unset what is left over (`unset WORLD_SIZE RANK`); {ALONE}"
        )


def launched_rank() -> int:
    """Returns this process's rank according to its launcher, or 0 without a launcher."""
    return max(0, launcher().rank)


def promised_ranks() -> int:
    """Returns the number of ranks according to the launcher, or 1 without a launcher."""
    return max(1, launcher().size)
