# SPDX-License-Identifier: Apache-2.0
"""The command `farandole`, which parses arguments and runs a subcommand.

It is installed as a script, and `python -m farandole` runs it as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import farandole
from farandole._library import is_from_core
from farandole.errors import error_text
from farandole.observe import flight_cli
from farandole.start import unmet
from farandole.tools import bench, check, doctor, settings, tune
from farandole.tools import run as launch

_UNREAD, _INTERRUPTED = 141, 130  # exit codes with which shells report SIGPIPE and SIGINT
_Run = Callable[[argparse.Namespace], int]
_Declare = Callable[[argparse.ArgumentParser], None]
_COMMANDS: dict[str, tuple[_Run, _Declare, str]] = {
    "config": (settings.run, settings.add_arguments, settings.EXAMPLES),
    "bench": (bench.run, bench.add_arguments, bench.EXAMPLES),
    "check": (check.run, check.add_arguments, check.EXAMPLES),
    "doctor": (doctor.run, doctor.add_arguments, doctor.EXAMPLES),
    "dump": (flight_cli.run_dump, flight_cli.add_dump_arguments, flight_cli.EXAMPLES),
    "explain": (flight_cli.run_explain, flight_cli.add_explain_arguments, flight_cli.EXAMPLES),
    "run": (launch.run, launch.add_arguments, launch.EXAMPLES),
    "tune": (tune.run, tune.add_arguments, tune.EXAMPLES),
}


_EXAMPLES = """\
examples:
  farandole doctor                          # check this machine
  farandole run -np 4 python train.py       # start a job
  farandole dump && farandole explain flight    # what is the job doing?

`farandole COMMAND --help` has more.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all subcommands. docs/ shows the parser's help."""
    layout = argparse.RawDescriptionHelpFormatter
    text = "Allreduce for data-parallel training under mpirun."
    whole = argparse.ArgumentParser("farandole", None, text, _EXAMPLES, formatter_class=layout)
    whole.add_argument("--version", action="version", version=farandole.__version__)
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, (run, add_arguments, examples) in _COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.epilog, command.formatter_class = examples, layout
        command.set_defaults(run=run)
        add_arguments(command)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    unmet.mark_met()  # a command under mpirun need not call init()
    whole = parser()
    options = whole.parse_args(arguments)
    if options.command is None:
        whole.print_help()
        return 0
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # for example, `head` has ended; the exit must not flush anything
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except (OSError, ImportError, farandole.FarandoleError, ValueError) as reason:
        if isinstance(reason, ValueError) and not is_from_core(reason):
            raise  # the error is a bug, and not a wrong setting
        print(f"farandole {options.command}: {error_text(reason)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
