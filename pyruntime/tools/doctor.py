# SPDX-License-Identifier: Apache-2.0
"""`farandole doctor`: checks this machine, and says what is wrong and what to do.

Under mpirun every rank examines its own process, all ranks test every backend together, and rank 0
prints one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from farandole.errors import FarandoleError, counted
from farandole.output import console
from farandole.start.bootstrap import Coming, Farewell, connect
from farandole.start.launchers import launched_rank, promised_ranks
from farandole.tools.doctor_backends import BACKENDS
from farandole.tools.doctor_checks import MACHINE, SOFTWARE, Finding, Level
from farandole.tools.doctor_hosts import BETWEEN_HOSTS

CHECKS = [*SOFTWARE, *BETWEEN_HOSTS, *MACHINE]

_TROUBLE = (Level.ERROR, Level.WARNING)
_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


EXAMPLES = """\
examples:
  farandole doctor                                  # this process alone
  mpirun -np 4 --bind-to none farandole doctor      # as many ranks as the jobs will have
  farandole doctor --all                            # also what is in order, one line each
  farandole doctor --json --no-self-test | jq '.findings[] | select(.level != "ok")'

It ends with 1 if it finds an error.
"""


@dataclass(frozen=True)
class _Row:
    """One finding, and the ranks that made it."""

    finding: Finding
    ranks: tuple[int, ...]


_Report = Callable[[list[_Row], int], int]  # prints all rows of so many ranks; the exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--json", action="store_true", help="all findings as one object")
    parser.add_argument("--all", action="store_true", help="a line for each check that passed, too")
    parser.add_argument("--no-self-test", action="store_true", help="look only, move no data")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each self test")


def run(options: argparse.Namespace) -> int:
    """Check this machine; under mpirun also test every backend."""
    report = _print_json if options.json else functools.partial(_print_table, options.all)
    findings = [finding for check in CHECKS for finding in _examine(check, check.__name__)]
    if options.no_self_test:
        return _look_only(findings, report)
    import farandole as fd

    try:
        fd.init()
    except Exception as reason:
        findings.append(Finding("init()", Level.ERROR, str(reason), "the text names it"))
        return _report_own(findings, report)
    rank, size = fd.rank(), fd.size()
    for backend in BACKENDS:
        test = functools.partial(backend, options.timeout)
        findings.extend(_examine(test, backend.__name__))
    try:
        fd.barrier(timeout=options.timeout)  # a rank that fails here can't send findings either
    except FarandoleError as reason:
        findings.append(
            Finding("meeting", Level.ERROR, str(reason), "the text names who is missing")
        )
        return report([_Row(finding, (rank,)) for finding in findings], size)
    everyone = fd.allgather_object(findings)
    fd.shutdown()
    return _report_all(everyone, rank, report)


def _look_only(findings: list[Finding], report: _Report) -> int:
    """Without starting the core: only the ranks' bootstrap, as in init()."""
    if promised_ranks() <= 1:
        return _report_own(findings, report)
    try:
        job = connect(purpose="doctor")
        # As JSON, which runs no code.
        told = json.dumps([dataclasses.astuple(finding) for finding in findings]).encode()
        everyone = [_findings(answer) for answer in job.allgather(told)]
    except (FarandoleError, ValueError) as reason:
        findings.append(Finding("meeting", Level.ERROR, str(reason), "the text names it"))
        return _report_own(findings, report)
    job.close(Farewell(Coming.PERHAPS), failed=False, broken=False)
    return _report_all(everyone, job.rank, report)


def _findings(told: bytes) -> list[Finding]:
    """What one rank has sent. Raises ValueError for what none would send."""
    return [
        Finding(str(name), Level(level), str(text), str(remedy))
        for name, level, text, remedy in json.loads(told)
    ]


def _report_own(findings: list[Finding], report: _Report) -> int:
    """Reports the findings of a rank that can't reach the others."""
    return report([_Row(finding, (launched_rank(),)) for finding in findings], promised_ranks())


def _report_all(everyone: list[list[Finding]], rank: int, report: _Report) -> int:
    """Rank 0 prints all ranks' findings; all return the same code."""
    if rank == 0:
        report(_merged(everyone), len(everyone))
    return int(any(f.level is Level.ERROR for findings in everyone for f in findings))


def _examine(check: Callable[[], Iterable[Finding]], name: str) -> Iterator[Finding]:
    """A check's findings; an exception in it becomes a finding."""
    try:
        yield from check()
    except Exception as reason:
        text = f"{type(reason).__name__}: {reason}"
        ours = isinstance(reason, FarandoleError)
        remedy = "the text names it" if ours else "please report this, with the whole table"
        yield Finding(name.strip("_").replace("_", " "), Level.ERROR, text, remedy)


def _merged(everyone: list[list[Finding]]) -> list[_Row]:
    """Findings in the order in which they were first made; merges equal ones of several ranks."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    names = list(dict.fromkeys(finding.name for finding in ranks))
    rows = [_Row(finding, tuple(who)) for finding, who in ranks.items()]
    return sorted(rows, key=lambda row: names.index(row.finding.name))


def _print_table(whole: bool, rows: list[_Row], size: int) -> int:
    """Prints what is wrong, worst first, and what passed: in one line, or in a `whole` table.

    Returns 1 for an error.
    """
    passed = [row for row in rows if row.finding.level is Level.OK]
    shown = sorted(
        (row for row in rows if whole or row.finding.level is not Level.OK),
        key=lambda row: -row.finding.level,
    )
    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "what", "finding", "remedy"):
        table.add_column(column, overflow="fold")
    for row in shown:
        finding = row.finding
        text = finding.text
        if size > 1 and len(row.ranks) < size:
            text = f"rank {', '.join(map(str, row.ranks))}: {text}"
        colour = _COLOURS[finding.level]
        label = f"[{colour}]{finding.level.name.lower()}[/]"
        table.add_row(label, finding.name, escape(text), escape(finding.remedy))
    if shown:
        console().print(table)
    if passed and not whole:
        names = "; ".join(dict.fromkeys(row.finding.name for row in passed))
        console().print(escape(f"in order: {names} (--all shows each)"))
    errors, warnings = (sum(r.finding.level is x for r in rows) for x in _TROUBLE)
    told = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    print(f"{told} on {counted(size, 'rank')}")
    return int(errors > 0)


def _print_json(rows: list[_Row], size: int) -> int:
    """The same as JSON."""
    found = [
        {**dataclasses.asdict(r.finding), "level": r.finding.level.name.lower(), "ranks": r.ranks}
        for r in rows
    ]
    errors, warnings = (sum(r.finding.level is x for r in rows) for x in _TROUBLE)
    totals = {"ranks": size, "errors": errors, "warnings": warnings}
    print(json.dumps({**totals, "findings": found}, indent=1))
    return int(errors > 0)
