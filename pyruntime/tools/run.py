# SPDX-License-Identifier: Apache-2.0
"""`farandole run`: the right mpirun, mpiexec or srun command for what is installed here."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import farandole
from farandole.launch.job import Job, outer_environment, parse_hostfile, parse_hosts
from farandole.launch.launchers import find

__all__ = ["add_arguments", "job_of", "run"]

_EXAMPLES = """\
examples:
  farandole run -np 4 python train.py
  farandole run -np 8 -H a:4,b:4 --dry-run python train.py
  farandole run -np 8 --hostfile hosts --log-level info --tag-output python train.py --epochs 3
  farandole run -np 4 --ulfm python elastic.py
  farandole run -np 4 -x DATA=/data --mpi-args="--mca smsc ^cma" python train.py

It is a thin layer: --dry-run shows the command, and that command alone does the same.
horovodrun's options are taken where they mean something here; the others say why they are not.
"""

# horovodrun's options that are settings: option -> Horovod's variable, the value's unit, meaning.
_SETTINGS = {
    "--fusion-threshold-mb": ("HOROVOD_FUSION_THRESHOLD", "M", "MB of tensors in one bucket"),
    "--cache-capacity": ("HOROVOD_CACHE_CAPACITY", "", "tensor names known by number"),
    "--start-timeout": ("HOROVOD_START_TIMEOUT", "", "seconds that ranks may take to meet"),
    "--stall-check-warning-time-seconds": (
        *("HOROVOD_STALL_CHECK_TIME_SECONDS", ""),
        "seconds until a tensor that some ranks wait for is reported",
    ),
    "--stall-check-shutdown-time-seconds": (
        *("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", ""),
        "seconds until such a wait ends in an error",
    ),
    "--log-level": ("HOROVOD_LOG_LEVEL", "", "trace, debug, info, warning, error or fatal"),
    "--timeline-filename": ("HOROVOD_TIMELINE", "", "where the timeline is written"),
}
_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
_NO_STALL_CHECK = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")

_NO_ELASTIC = (
    "no process here watches hosts come and go; --ulfm lets survivors go on, and a supervisor that "
    "runs this command again continues from the last commit"
)
_NO_AUTOTUNE = "tune once for the machine instead: `farandole tune`"
_HIERARCHY = "how bytes travel follows from which ranks share a host; there is nothing to choose"
_REFUSED = {
    "--cycle-time-ms": "there is no cycle: a rank speaks when it has something to say",
    "--gloo": "ranks meet through MPI",
    "--jsrun": "start jsrun directly",
    "--tcp": 'give it to MPI: --mpi-args="--mca btl tcp,self"',
    "--config-file": "set FARANDOLE_ variables (`farandole config` lists them)",
    "--mpi-threads-disable": "MPI has one thread inside a host anyway",
    "--num-nccl-streams": "each GPU has one stream for reductions",
    "--thread-affinity": "bind ranks instead: --binding-args",
    "--gloo-timeout-seconds": "there is no Gloo; --start-timeout bounds the start",
    **dict.fromkeys(("--log-with-timestamp", "--log-hide-timestamp"), "log lines have none"),
    **dict.fromkeys(
        (
            *("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
            *("--hierarchical-allgather", "--no-hierarchical-allgather"),
            *("--torus-allreduce", "--no-torus-allreduce"),
        ),
        _HIERARCHY,
    ),
    **dict.fromkeys(
        (
            *("--autotune", "--autotune-log-file", "--autotune-warmup-samples"),
            *("--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples"),
            *("--autotune-gaussian-process-noise",),
        ),
        _NO_AUTOTUNE,
    ),
    **dict.fromkeys(
        (
            *("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host"),
            *("--elastic-timeout", "--reset-limit", "--blacklist-cooldown-range"),
            *("--host-discovery-script", "--slots"),
        ),
        _NO_ELASTIC,
    ),
}


class _Refuse(argparse.Action):
    """Ends the command with the reason for which an option has no meaning here."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        parser.error(f"{rest[-1]} of horovodrun is not taken: {_REFUSED[rest[-1]]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    add = parser.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="how many ranks; default: all slots of -H")
    add("-H", "--hosts", metavar="LIST", help="a:4,b:4; default: here, or the batch allocation")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines `a slots=4` or `a:4`")
    add("--dry-run", action="store_true", help="show the command, start nothing")
    add("--verbose", action="store_true", help="show the command before it starts")
    text = "auto (srun in a Slurm allocation that has pmix, else mpirun), or a program"
    add("--launcher", default="auto", metavar="WHICH", help=text)
    text = "set or forward a variable of the environment for all ranks; may come again"
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    add("--oversubscribe", action="store_true", help="more ranks than slots on the hosts of -H")
    add("--ulfm", action="store_true", help="survivors outlive a rank's death (Open MPI 5)")
    text = 'the launcher\'s own words for binding; default: none, as in "--bind-to none"'
    add("--binding-args", type=shlex.split, metavar="WORDS", help=text)
    text = "further words for the launcher, behind all others"
    add("--mpi-args", type=shlex.split, default=[], metavar="WORDS", help=text)
    add("--tag-output", action="store_true", help="output lines begin with their rank")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    add("--output-filename", metavar="PREFIX", help="files for the ranks' output")
    text = "of the network, e.g. eth0,ib0"
    add("--network-interfaces", "--network-interface", metavar="LIST", help=text)
    add("-p", "--ssh-port", type=int, metavar="PORT")
    add("-i", "--ssh-identity-file", metavar="FILE")
    add("-cb", "--check-build", action="store_true", help="as `farandole check`")
    add("-v", "--version", action="version", version=farandole.__version__)
    for option, (_, _, meaning) in _SETTINGS.items():
        add(option, metavar="X", help=meaning)
    add("--no-stall-check", action="store_true", help="neither report nor end a stalled wait")
    add("--timeline-mark-cycles", action="store_true", help="as FARANDOLE_TIMELINE_MARK_CYCLES=1")
    usual = ("--stall-check", "--mpi", "--disable-cache", "--no-timeline-mark-cycles")
    for option in usual:  # it is so
        add(option, action="store_true", help=argparse.SUPPRESS)
    for option in _REFUSED:
        add(option, nargs="?", action=_Refuse, help=argparse.SUPPRESS)
    add("command_line", nargs=argparse.REMAINDER, metavar="command ...", help="what each rank runs")


def run(options: argparse.Namespace) -> int:
    """Start a program on many ranks through the launcher of MPI or Slurm that is here."""
    if options.check_build:
        from farandole.tools import cli

        return cli.main(["check"])
    try:
        job = job_of(options)
        command = find(options.launcher).command(job)
    except (ValueError, OSError) as reason:
        print(f"farandole run: {reason}", file=sys.stderr)
        return 2
    if options.dry_run or options.verbose:
        settings = [f"{k}={v}" for k, v in sorted(job.environment.items())]
        stream = sys.stdout if options.dry_run else sys.stderr
        print(shlex.join([*(["env", *settings] if settings else []), *command]), file=stream)
    if options.dry_run:
        return 0
    sys.stdout.flush()
    return os.execve(command[0], command, outer_environment(job))


def job_of(options: argparse.Namespace) -> Job:
    """The Job that parsed options ask for. Raises ValueError, OSError."""
    command = tuple(options.command_line)
    command = command[1:] if command[:1] == ("--",) else command
    if not command:
        raise ValueError("no command; for example: farandole run -np 2 python train.py")
    if options.hosts and options.hostfile:
        raise ValueError("-H or --hostfile, not both")
    hosts = parse_hosts(options.hosts) if options.hosts else ()
    hosts = parse_hostfile(options.hostfile) if options.hostfile else hosts
    ranks = options.num_proc or sum(host.slots for host in hosts)
    if ranks < 1:
        raise ValueError("how many ranks? -np N")
    settings, forwarded = _environment(options)
    return Job(
        command=command,
        ranks=ranks,
        hosts=hosts,
        environment=settings,
        forwarded=forwarded,
        binding=None if options.binding_args is None else tuple(options.binding_args),
        oversubscribe=options.oversubscribe,
        ulfm=options.ulfm,
        tag=options.tag_output,
        timestamp=options.prefix_output_with_timestamp,
        output=options.output_filename,
        interfaces=options.network_interfaces,
        ssh_port=options.ssh_port,
        ssh_identity=options.ssh_identity_file,
        extra=tuple(options.mpi_args),
    )


def _environment(options: argparse.Namespace) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables to set, names to forward) of -x and of the options that are settings."""
    ours = {v.alias: v.name for v in farandole.config() if v.alias}
    settings = {}
    for option, (variable, unit, _) in _SETTINGS.items():
        value = getattr(options, option[2:].replace("-", "_"))
        if value is not None:
            if variable not in ours:
                raise ValueError(f"{option}: this build of farandole has no such setting")
            settings[ours[variable]] = f"{value}{unit}"
    if options.no_stall_check:
        settings |= {ours[variable]: "0" for variable in _NO_STALL_CHECK}
    if options.timeline_mark_cycles:
        settings[ours[_MARK_CYCLES]] = "1"
    forwarded = []
    for text in options.env:
        name, equals, value = text.partition("=")
        if equals:
            settings[name] = value
        else:
            forwarded.append(name)
    return settings, tuple(forwarded)
