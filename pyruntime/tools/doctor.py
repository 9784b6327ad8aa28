# SPDX-License-Identifier: Apache-2.0
"""`farandole doctor`: what this machine offers, what is wrong with it, and what to do.

Under mpirun every rank examines its own process, all ranks test every plane together, and rank 0
prints one table.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from farandole.errors import FarandoleError
from farandole.start.bootstrap import Coming, Farewell, connect, launched_rank, promised_ranks
from farandole.tools.doctor_checks import CHECKS
from farandole.tools.doctor_planes import PLANES
from farandole.tools.finding import Finding, Level

__all__ = ["add_arguments", "run"]

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@dataclass(frozen=True)
class _Row:
    """One finding, and the ranks that made it."""

    finding: Finding
    ranks: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--no-self-test", action="store_true", help="look only, move no data")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each self test")


def run(options: argparse.Namespace) -> int:
    """What this machine offers and what is wrong; under mpirun also a test of every plane."""
    findings = [finding for check in CHECKS for finding in _examine(check, check.__name__)]
    if options.no_self_test:
        return _look_only(findings)
    import farandole as fd

    try:
        fd.init()
    except Exception as reason:
        remedy = "the text above names it; `farandole check` shows what is loaded"
        findings.append(Finding("init()", Level.ERROR, str(reason), remedy))
        return _report_own(findings)
    rank, size = fd.rank(), fd.size()
    for plane in PLANES:
        test = functools.partial(plane, options.timeout)
        findings.extend(_examine(test, plane.__name__))
    try:
        fd.barrier(timeout=options.timeout)  # who can't come here can't give its findings either
    except FarandoleError as reason:
        findings.append(
            Finding("meeting", Level.ERROR, str(reason), "the text names who is missing")
        )
        return _report([_Row(finding, (rank,)) for finding in findings], size)
    everyone = fd.allgather_object(findings)
    fd.shutdown()
    return _report_all(everyone, rank)


def _look_only(findings: list[Finding]) -> int:
    """Without the core: ranks that a launcher started meet as for init(), and no further."""
    if promised_ranks() <= 1:
        return _report_own(findings)
    try:
        job = connect()
    except FarandoleError as reason:
        findings.append(Finding("meeting", Level.ERROR, str(reason), "the text names it"))
        return _report_own(findings)
    everyone = [pickle.loads(data) for data in job.allgather(pickle.dumps(findings))]
    job.close(Farewell(Coming.PERHAPS), failed=False, broken=False)
    return _report_all(everyone, job.rank)


def _report_own(findings: list[Finding]) -> int:
    """Of a rank that does not meet the others."""
    return _report([_Row(finding, (launched_rank(),)) for finding in findings], promised_ranks())


def _report_all(everyone: list[list[Finding]], rank: int) -> int:
    """Rank 0 prints for all; all return the same code."""
    if rank == 0:
        _report(_merged(everyone), len(everyone))
    return int(any(f.level is Level.ERROR for findings in everyone for f in findings))


def _examine(check: Callable[[], Iterable[Finding]], name: str) -> Iterator[Finding]:
    """A check's findings; one that fails itself is a finding too."""
    try:
        yield from check()
    except Exception as reason:
        text = f"{type(reason).__name__}: {reason}"
        ours = isinstance(reason, FarandoleError)
        remedy = "the text names it" if ours else "please report this, with the whole table"
        yield Finding(name.strip("_").replace("_", " "), Level.ERROR, text, remedy)


def _merged(everyone: list[list[Finding]]) -> list[_Row]:
    """Findings in the order in which they were first made, equal ones of several ranks once."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    names = list(dict.fromkeys(finding.name for finding in ranks))
    rows = [_Row(finding, tuple(who)) for finding, who in ranks.items()]
    return sorted(rows, key=lambda row: names.index(row.finding.name))


def _report(rows: list[_Row], size: int) -> int:
    """Prints the table; 1 if it holds an error."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "what", "finding", "remedy"):
        table.add_column(column, overflow="fold")
    for row in rows:
        finding = row.finding
        text = finding.text
        if size > 1 and len(row.ranks) < size:
            text = f"rank {', '.join(map(str, row.ranks))}: {text}"
        colour = _COLOURS[finding.level]
        label = f"[{colour}]{finding.level.name.lower()}[/]"
        table.add_row(label, finding.name, _plain(text), _plain(finding.remedy))
    terminal = Console()
    width = shutil.get_terminal_size((160, 24)).columns
    console = terminal if terminal.is_terminal else Console(width=width)
    console.print(table)
    count = {level: sum(row.finding.level is level for row in rows) for level in Level}
    print(f"{count[Level.ERROR]} errors, {count[Level.WARNING]} warnings on {size} rank(s)")
    return int(count[Level.ERROR] > 0)


def _plain(text: str) -> str:
    """As it stands: `[...]` is no markup of rich's."""
    from rich.markup import escape

    return escape(text)
