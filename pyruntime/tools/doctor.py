# SPDX-License-Identifier: Apache-2.0
"""`farandole doctor` checks this machine, and prints problems with remedies.

Under mpirun, every rank checks its own process, all ranks together test every backend, and rank 0
prints one list.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from farandole.errors import FarandoleError, counted
from farandole.output import seconds
from farandole.start.launchers import launched_rank, promised_ranks
from farandole.tools.doctor_backends import BACKENDS
from farandole.tools.doctor_checks import MACHINE, SOFTWARE, Finding, Level
from farandole.tools.doctor_hosts import BETWEEN_HOSTS

CHECKS = [*SOFTWARE, *BETWEEN_HOSTS, *MACHINE]

_TROUBLE = (Level.ERROR, Level.WARNING)


EXAMPLES = """\
examples:
  farandole doctor                                  # this process alone
  mpirun -np 4 --bind-to none farandole doctor      # as many ranks as the jobs will have
  farandole doctor --all                            # list passed checks, too

Exit code 1: it found an error.
"""


@dataclass(frozen=True)
class _Row:
    finding: Finding
    ranks: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("--all", action="store_true", help="print a line for each passed check, too")
    add("--timeout", type=seconds, default=30.0, help="seconds per self test (30)")


def run(options: argparse.Namespace) -> int:
    """Check this machine, and test every backend; under mpirun all ranks do so together."""
    import farandole as fd

    findings = [finding for check in CHECKS for finding in _examine(check, check.__name__)]
    try:
        fd.init()
    except Exception as reason:
        findings.append(Finding("init()", Level.ERROR, str(reason), "see the text"))
        own = [_Row(finding, (launched_rank(),)) for finding in findings]
        return _report(own, promised_ranks(), options.all)
    rank, size = fd.rank(), fd.size()
    for backend in BACKENDS:
        test = functools.partial(backend, options.timeout)
        findings.extend(_examine(test, backend.__name__))
    try:
        fd.barrier(timeout=options.timeout)  # a rank that fails here cannot send findings
    except FarandoleError as reason:
        findings.append(
            Finding("meeting", Level.ERROR, str(reason), "the text names the missing ranks")
        )
        return _report([_Row(finding, (rank,)) for finding in findings], size, options.all)
    everyone = fd.allgather_object(findings)
    fd.shutdown()
    if rank == 0:
        _report(_merged(everyone), size, options.all)
    return int(any(f.level is Level.ERROR for findings in everyone for f in findings))


def _examine(check: Callable[[], Iterable[Finding]], name: str) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as reason:
        text = f"{type(reason).__name__}: {reason}"
        ours = isinstance(reason, FarandoleError)
        remedy = "see the text" if ours else "please report this, with the whole table"
        yield Finding(name.strip("_").replace("_", " "), Level.ERROR, text, remedy)


def _merged(everyone: list[list[Finding]]) -> list[_Row]:
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    names = list(dict.fromkeys(finding.name for finding in ranks))
    rows = [_Row(finding, tuple(who)) for finding, who in ranks.items()]
    return sorted(rows, key=lambda row: names.index(row.finding.name))


def _report(rows: list[_Row], size: int, whole: bool) -> int:
    """Prints problems, the worst first, then the passed checks.

    If `whole` is True, prints a line for each passed check, otherwise one line for all. Returns 1
    if there is an error, else 0.
    """
    passed = [row for row in rows if row.finding.level is Level.OK]
    for row in sorted(rows, key=lambda row: -row.finding.level):
        finding, text = row.finding, row.finding.text
        if finding.level is Level.OK and not whole:
            continue
        if size > 1 and len(row.ranks) < size:
            text = f"rank {', '.join(map(str, row.ranks))}: {text}"
        print(f"{finding.level.name.lower():8} {finding.name}: {text}")
        if finding.remedy:
            print(f"         remedy: {finding.remedy}")
    if passed and not whole:
        names = "; ".join(dict.fromkeys(row.finding.name for row in passed))
        print(f"in order: {names} (--all shows each)")
    errors, warnings = (sum(r.finding.level is x for r in rows) for x in _TROUBLE)
    summary = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    print(f"{summary} on {counted(size, 'rank')}", flush=True)
    return int(errors > 0)
