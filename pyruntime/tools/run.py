# SPDX-License-Identifier: Apache-2.0
"""`farandole run` builds the mpirun, mpiexec or srun command that fits this machine.

It then becomes that program. With --elastic, it supervises the job itself.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import farandole
from farandole.config import home_for_mpi, setting
from farandole.errors import error_text
from farandole.launch.agent import BEAT
from farandole.launch.commands import find
from farandole.launch.host_list import ranks_on
from farandole.launch.job import Job, parse_hostfile, parse_hosts
from farandole.launch.supervisor import ElasticOptions, supervise
from farandole.membership.scheduler import Policy
from farandole.output import int_at_least
from farandole.start import system_calls

EXAMPLES = """\
examples:
  farandole run -np 4 python train.py
  farandole run -np 8 -H a:4,b:4 --dry-run python train.py
  farandole run -np 8 --hostfile hosts --log-level info --tag-output python train.py --epochs 3
  farandole run -np 8 --min-np 4 -H a:4,b:4 --elastic python elastic.py
  farandole run -np 4 -x DATA=/data --mpi-args="--mca smsc ^cma" python train.py

--dry-run prints the command; you may run that command directly. `farandole run` accepts the options
of horovodrun that apply here, and says why it refuses the others.
"""

# horovodrun's options that stand for settings. Each has Horovod's variable, a suffix for the unit,
# and a meaning.
_SETTINGS = {
    "--fusion-threshold-mb": ("HOROVOD_FUSION_THRESHOLD", "M", "most MB of tensors in one bucket"),
    "--cache-capacity": ("HOROVOD_CACHE_CAPACITY", "", "most tensor names in the cache"),
    "--start-timeout": ("HOROVOD_START_TIMEOUT", "", "seconds that the ranks may take to start"),
    "--stall-check-warning-time-seconds": (
        *("HOROVOD_STALL_CHECK_TIME_SECONDS", ""),
        "seconds until farandole reports a tensor that some ranks wait for",
    ),
    "--stall-check-shutdown-time-seconds": (
        *("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", ""),
        "seconds until such a wait raises an error",
    ),
    "--log-level": ("HOROVOD_LOG_LEVEL", "", "trace, debug, info, warning, error or fatal"),
    "--timeline-filename": ("HOROVOD_TIMELINE", "", "file for the timeline"),
}
_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
_NO_STALL_CHECK = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")

_NO_AUTOTUNE = "tune once per machine instead: `farandole tune`"
_HIERARCHY = "farandole decides by which ranks share a host; there is nothing to choose"
_REFUSED = {
    "--cycle-time-ms": "there is no cycle: a rank reports at once",
    "--jsrun": "start jsrun directly",
    "--tcp": 'pass it to MPI: --mpi-args="--mca btl tcp,self"',
    "--config-file": "set FARANDOLE_ variables (`farandole config` lists them)",
    "--mpi-threads-disable": "MPI runs on one thread inside a host anyway",
    "--num-nccl-streams": "each GPU has one stream for reductions",
    "--thread-affinity": "bind ranks instead: --binding-args",
    "--gloo-timeout-seconds": "farandole does not use Gloo; --start-timeout limits the start",
    **dict.fromkeys(("--log-with-timestamp", "--log-hide-timestamp"), "log lines have no time"),
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
    "--reset-limit": "use --restarts, which limits restarts in a row without a commit",
}


_FOLDER = "FARANDOLE_CHECKPOINT_DIR"

# Options for elastic jobs only, with their defaults.
_OF_ELASTIC: dict[str, Any] = {
    "restarts": 3,
    "elastic_timeout": 600.0,
    "blacklist_cooldown_range": (10.0, 600.0),
    "slots_per_host": 1,
    "checkpoint_dir": None,
}


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        parser.error(f"farandole does not take horovodrun's {rest[-1]}: {_REFUSED[rest[-1]]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.allow_abbrev = False
    add = parser.add_argument
    text = "number of ranks; default: all slots of -H"
    add("-np", "--num-proc", type=int_at_least(1), metavar="N", help=text)
    add("-H", "--hosts", metavar="LIST", help="a:4,b:4; default: this host, or the allocation")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines `a slots=4` or `a:4`")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    add("--verbose", action="store_true", help="print the command before it starts")
    text = (
        "a launcher's program, or auto: srun in an allocation that can start this MPI, else mpirun"
    )
    add("--launcher", default="auto", metavar="WHICH", help=text)
    text = "set or forward an environment variable for all ranks; may be repeated"
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    add("--oversubscribe", action="store_true", help="allow more ranks than slots")
    text = 'the launcher\'s own binding options; default: none, as in "--bind-to none"'
    add("--binding-args", type=shlex.split, metavar="WORDS", help=text)
    text = "more arguments for the launcher, after all others"
    add("--mpi-args", type=shlex.split, default=[], metavar="WORDS", help=text)
    add("--tag-output", action="store_true", help="start each output line with its rank")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    add("--output-filename", metavar="PREFIX", help="prefix of the files for the ranks' output")
    text = "network interfaces, e.g. eth0,ib0"
    add("--network-interfaces", "--network-interface", metavar="LIST", help=text)
    add("-p", "--ssh-port", type=int, metavar="PORT")
    add("-i", "--ssh-identity-file", metavar="FILE")
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="run `farandole doctor --all`",
    )
    add("-v", "--version", action="version", version=farandole.__version__)
    for option, (_, _, meaning) in _SETTINGS.items():
        add(option, metavar="X", help=meaning)
    add("--no-stall-check", action="store_true", help="neither report nor end a stalled wait")
    add("--timeline-mark-cycles", action="store_true", help="set FARANDOLE_TIMELINE_MARK_CYCLES=1")
    usual = ("--stall-check", "--mpi", "--gloo", "--disable-cache", "--no-timeline-mark-cycles")
    for option in usual:  # accepted and ignored: farandole always behaves like this
        add(option, action="store_true", help=argparse.SUPPRESS)
    _add_elastic_arguments(parser.add_argument_group("elastic training"))
    for option in _REFUSED:
        add(option, nargs="?", action=_Refuse, help=argparse.SUPPRESS)
    add("command_line", nargs=argparse.REMAINDER, metavar="command ...", help="what each rank runs")


def _add_elastic_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "continue without lost, stopped or hung ranks; does not use MPI; implied by --min-np, "
    text += "--max-np and --host-discovery-script"
    add("--elastic", action="store_true", help=text)
    text = "continue with at least this many ranks; default: -np"
    add("--min-np", "--min-num-proc", type=int_at_least(1), metavar="N", help=text)
    text = "use at most this many ranks; default: -np, or all slots"
    add("--max-np", "--max-num-proc", type=int_at_least(1), metavar="N", help=text)
    text = "command that prints the available hosts, one `a:4` per line; runs every second"
    add("--host-discovery-script", default="", metavar="COMMAND", help=text)
    text = "ranks on a host whose line has no number; default: 1"
    add("--slots-per-host", "--slots", type=int_at_least(1), metavar="N", help=text)
    text = "seconds to avoid a failed host, doubled each time up to MAX; default: 10 600"
    cooldown = ("--blacklist-cooldown-range",)
    add(*cooldown, type=float, nargs=2, metavar=("MIN", "MAX"), help=text)
    text = "times that all ranks may be lost without a commit in between; default: 3"
    add("--restarts", type=int, metavar="N", help=text)
    text = "seconds to wait for enough hosts for --min-np ranks; default: 600"
    add("--elastic-timeout", type=float, metavar="SECONDS", help=text)
    text = f"folder to write commits to and start from; default: {_FOLDER}, or a new folder"
    add("--checkpoint-dir", type=Path, metavar="DIR", help=text)


def _elastic_options(options: argparse.Namespace, job: Job) -> ElasticOptions | None:
    """Returns the options of an elastic job, or None for other jobs.

    Raises ValueError if options are wrong.
    """
    script, least, most = options.host_discovery_script, options.min_np, options.max_np
    if not (options.elastic or script or least or most):
        for name in _OF_ELASTIC:
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for elastic jobs: add --elastic")
        return None
    most = most or options.num_proc
    least = least or options.num_proc or (1 if script else job.ranks)
    if most is not None and most < least:
        raise ValueError(
            f"--min-np {least} and --max-np {most} contradict each other: "
            "lower --min-np or raise --max-np"
        )
    slots = ranks_on(job.hosts)
    if job.hosts and not script and slots < least:
        raise ValueError(f"{slots} slots do not hold {least} ranks: add slots (-H name:slots)")
    given = ((getattr(options, name), usual) for name, usual in _OF_ELASTIC.items())
    restarts, patience, cooldown, slots_of_host, folder = (
        usual if own is None else own for own, usual in given
    )
    if restarts < 0 or not patience >= 0:
        raise ValueError("--restarts and --elastic-timeout must be at least 0")
    grace = job.environment.get("FARANDOLE_GRACE") or setting("FARANDOLE_GRACE")
    if not re.fullmatch(r"\d+(\.\d*)?", grace):
        raise ValueError(f"FARANDOLE_GRACE={grace!r} is not a number of seconds")
    shortest, longest = cooldown
    if not 0 <= shortest <= longest:
        raise ValueError(f"--blacklist-cooldown-range {shortest:g} {longest:g}: 0 <= MIN <= MAX")
    folder = folder or job.environment.get(_FOLDER) or setting(_FOLDER)
    stall = job.environment.get("FARANDOLE_STALL_ABORT") or setting("FARANDOLE_STALL_ABORT")
    silence = job.environment.get("FARANDOLE_PEER_TIMEOUT") or setting("FARANDOLE_PEER_TIMEOUT")
    policy = Policy(
        least=least,
        most=most if most is not None else 1 << 20,  # the slots are the limit
        silence=max(2 * BEAT, float(silence) / 3),
        lease=float(silence),
        late=float(stall) or float("inf"),
        patience=patience,
        restarts=restarts,
        cooldown=(shortest, longest),
        grows=bool(script),
    )
    return ElasticOptions(
        policy=policy,
        script=script,
        slots=slots_of_host,
        grace=float(grace),
        folder=Path(folder) if folder else None,
    )


def run(options: argparse.Namespace) -> int:
    """Start a program on several ranks with this machine's launcher, MPI's or Slurm's."""
    if options.check_build:
        from farandole.tools import cli

        return cli.main(["doctor", "--all"])
    try:
        job = job_of(options)
        elastic = _elastic_options(options, job)
        if elastic is not None:
            return _supervised(options, job, elastic)
        launcher = find(options.launcher)
        command = launcher.command(job)
    except (ValueError, OSError) as reason:
        print(f"farandole run: {error_text(reason)}", file=sys.stderr)
        return 2
    if options.dry_run or options.verbose:
        settings = [f"{k}={v}" for k, v in sorted(job.environment.items())]
        stream = sys.stdout if options.dry_run else sys.stderr
        print(shlex.join([*(["env", *settings] if settings else []), *command]), file=stream)
    if options.dry_run:
        return 0
    sys.stdout.flush()
    if sys.stderr.isatty():
        _answer_interrupts(launcher.name)
    with home_for_mpi():
        return os.execve(command[0], command, launcher.environment(job))


def _answer_interrupts(launcher: str) -> None:
    """Starts a process that reports Ctrl-C, because launchers end all ranks without a message.

    The process is not the launcher's child, because the launcher would count a child as a rank. The
    process ends together with the launcher.
    """
    try:
        launcher_fd = system_calls.pidfd_open(os.getpid())  # execve keeps the process id
    except OSError:  # an old kernel
        return
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(launcher_fd)
        return
    if os.fork():
        os._exit(0)
    text = f"farandole run: Ctrl-C: {launcher} ends all ranks\r\n".encode()
    signal.signal(signal.SIGINT, lambda *_: os.write(2, text))
    ended = select.poll()
    ended.register(launcher_fd, select.POLLIN)
    ended.poll()
    os._exit(0)


def _supervised(options: argparse.Namespace, job: Job, elastic: ElasticOptions) -> int:
    for name in ("binding_args", "mpi_args", "output_filename", "network_interfaces"):
        if getattr(options, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for MPI's launchers, which --elastic does not use")
    if options.dry_run:
        hosts = [host.name for host in job.hosts] or ["this host"]
        print(f"an agent on {', '.join(hosts)}; each rank: {shlex.join(job.command)}")
        return 0
    return supervise(job, elastic)


def job_of(options: argparse.Namespace) -> Job:
    """Builds the Job from parsed options. Raises ValueError and OSError."""
    command = tuple(options.command_line)
    command = command[1:] if command[:1] == ("--",) else command
    if not command:
        raise ValueError("no command; for example: farandole run -np 2 python train.py")
    if options.hosts and options.hostfile:
        raise ValueError("pass -H or --hostfile, not both")
    hosts = parse_hosts(options.hosts) if options.hosts else ()
    hosts = parse_hostfile(options.hostfile) if options.hostfile else hosts
    ranks = options.num_proc or options.max_np or sum(host.slots for host in hosts)
    ranks = ranks or int(bool(options.host_discovery_script))  # the script will find more
    if ranks < 1:
        raise ValueError("the number of ranks is missing: pass -np N")
    settings, forwarded = _environment(options)
    job = Job(
        command=command,
        ranks=ranks,
        hosts=hosts,
        environment=settings,
        forwarded=forwarded,
        binding=None if options.binding_args is None else tuple(options.binding_args),
        oversubscribe=options.oversubscribe,
        tag=options.tag_output,
        timestamp=options.prefix_output_with_timestamp,
        output=options.output_filename,
        interfaces=options.network_interfaces,
        ssh_port=options.ssh_port,
        ssh_identity=options.ssh_identity_file,
        extra=tuple(options.mpi_args),
    )
    if job.here:
        _check_program(command, ranks)
    return job


def _check_program(command: Sequence[str], ranks: int) -> None:
    """Raises ValueError if this machine cannot execute the command.

    The launcher's own error would be long.
    """
    program = command[0]
    if shutil.which(program):
        return
    line = shlex.join(command)
    if program.endswith(".py"):
        hint = f"did you mean `farandole run -np {ranks} python {line}`?"
    elif Path(program).exists():
        hint = f"it is here, but not executable: did you mean ./{program}, or chmod +x?"
    else:
        hint = "it is not on PATH"
    raise ValueError(f"{program} is not a program that can be started: {hint}")


def _environment(options: argparse.Namespace) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the variables to set and the names to forward.

    They come from -x and from the options that set variables.
    """
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
