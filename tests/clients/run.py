#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects over farandole, unmodified.

    make test-clients ARGS="[CLIENT...] [--quick] [--ranks N] [-k PATTERN] [--write]"

Each client's release comes from the package index into an environment of its own in build/clients,
with its tests, from the package or its sdist; nothing is fetched as they run. Suites that only
repositories have run from a copy outside: CLIENT_SOURCE=folder. `--write` puts the table into
docs/clients.md. Ends with 1 if a test fails that its suite does not explain.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from clients import suites  # noqa: E402
from clients.suite import HERE, Suite  # noqa: E402

from farandole.as_horovod import FOLDER  # noqa: E402
from harness.mpirun import MPI_ENVIRONMENT, MpiJob  # noqa: E402
from harness.process import Job, JobError  # noqa: E402

BUILD = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "clients.md"
Outcomes = dict[str, tuple[str, str]]  # a test -> passed, failed or skipped, and why


def all_suites() -> list[Suite]:
    """Those of suites/, by file."""
    names = sorted(module.name for module in pkgutil.iter_modules(suites.__path__))
    files = [importlib.import_module(f"clients.suites.{name}") for name in names]
    return [suite for file in files for suite in file.SUITES]


def environment(suite: Suite) -> Path:
    """The interpreter of the suite's environment, which sees this one's packages too."""
    folder = BUILD / suite.client
    python, stamp = folder / "bin" / "python", folder / "packages"
    wanted = "\n".join(suite.packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        furnish(next(folder.glob("lib/python*/site-packages")))
        pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *suite.packages], check=True)
        if suite.sdist:
            line = ["download", "--no-deps", "--no-binary=:all:", "-d", str(folder / "sdist")]
            subprocess.run([*pip, *line, suite.packages[0]], check=True)
            (packed,) = (folder / "sdist").glob("*.tar.gz")
            shutil.unpack_archive(packed, folder / "source", filter="data")
        stamp.write_text(wanted)
    return python


def furnish(site: Path) -> None:
    """Puts this environment's packages into the site, and what stands for a package of it."""
    lines = (
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})",
        "import os, sys; sys.path += filter(None, [os.environ.get('CLIENT_PATH')])",
    )
    site.joinpath("rest.pth").write_text("\n".join([*lines, ""]))
    site.joinpath("as_gloo.py").symlink_to(HERE / "as_gloo.py")
    about = site / "as_gloo-0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: as-gloo\nVersion: 0\n")
    about.joinpath("entry_points.txt").write_text("[torch.backends]\nas_gloo = as_gloo:start\n")


def source_of(suite: Suite) -> str:
    """The folder of its tests; "" where they are in the package."""
    if suite.repository:
        return os.environ.get("CLIENT_SOURCE", "")
    found = sorted((BUILD / suite.client / "source").glob("*/"))
    return str(found[0]) if found else ""


def run(suite: Suite, ranks: int, pattern: str) -> Outcomes:
    """Each test's outcome over all ranks: the worst."""
    environment(suite)
    chosen = selection(suite, pattern)
    if suite.runner == "modules":
        found: Outcomes = {}
        for name in suite.arguments:
            if pattern in name:
                found |= one_of(job(suite, ranks, [name]), name)
        return found
    arguments = [*suite.arguments, *(["-k", chosen] if chosen else [])]
    if not suite.each:
        return job(suite, ranks, arguments)
    listed = job(suite, ranks, [*arguments, "--collect-only"])
    if any(outcome == "failed" for outcome, _ in listed.values()):
        return listed
    *options, file = suite.arguments
    found = {}
    for name in listed:
        test = f"{file}::{name.partition('::')[2]}"
        found |= one_of(job(suite, ranks, [*options, test]), name)
    return found


def one_of(found: Outcomes, name: str) -> Outcomes:
    """The outcome of the job of a single test."""
    return {name: found.get(name) or found.get("the whole", ("failed", "it did not run"))}


def selection(suite: Suite, pattern: str) -> str:
    """For pytest's -k."""
    patterns = [f"({text})" for text in (suite.select, pattern) if text]
    return " and ".join([*(f"not {name}" for name in suite.left_out), *patterns])


def job(suite: Suite, ranks: int, arguments: list[str]) -> Outcomes:
    """The outcomes of one job of in_rank.py."""
    python, source = environment(suite), source_of(suite)
    fields = {"source": source, "ranks": ranks, "python": python}
    with tempfile.TemporaryDirectory() as folder:
        groups = Path(folder, "groups")
        extra = {"OMP_NUM_THREADS": "1", "CLIENT_FOLDER": folder}
        extra |= {name: text.format(**fields) for name, text in suite.environment.items()}
        if suite.mode == "as_gloo":
            extra["CLIENT_GROUPS"] = str(groups)
        if suite.mode == "horovod":  # as if installed, whatever PYTHONPATH a test sets
            extra["CLIENT_PATH"] = FOLDER
        command = [str(python), str(HERE / "in_rank.py"), suite.mode, suite.runner]
        command += [text.format(**fields) for text in arguments]
        with contextlib.chdir(source or folder):
            if suite.launched:
                started = MpiJob(command, ranks, extra)
            else:
                started = Job(command, {**MPI_ENVIRONMENT, **extra})
        try:
            print(started.finish(suite.seconds).out[-4000:], flush=True)
        except JobError as reason:
            return {"the whole": ("failed", str(reason))}
        served = Counter(groups.read_text().splitlines() if groups.exists() else [])
        files = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(files) < (ranks if suite.launched else 1):
        return {"the whole": ("failed", f"{len(files)} of {ranks} ranks came to the end")}
    if suite.mode == "as_gloo":
        print(f"groups, by class and size: {dict(served)}", flush=True)
        if not served or any(not group.startswith("farandole.") for group in served):
            return {"the whole": ("failed", "groups that farandole did not serve")}
    merged: Outcomes = {}
    for found in files:
        for name, (outcome, text) in found.items():
            if outcome == "failed" or merged.get(name, ("skipped", ""))[0] == "skipped":
                merged[name] = (outcome, text)
    return merged


def version(suite: Suite) -> str:
    """Of the client."""
    if suite.repository:
        line = ["git", "-C", source_of(suite), "rev-parse", "--short", "HEAD"]
        return subprocess.run(line, capture_output=True, text=True).stdout.strip() or "a copy"
    name = re.split("[=<>[]", suite.packages[0])[0]
    program = f"import importlib.metadata as m; print(m.version({name!r}))"
    line = [str(environment(suite)), "-c", program]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def report(suite: Suite, ranks: int, found: Outcomes) -> tuple[str, list[str]]:
    """A row of the table, and the failures that nothing explains."""
    counts = Counter(outcome for outcome, _ in found.values())
    failed = {name: text for name, (outcome, text) in found.items() if outcome == "failed"}
    explained: dict[str, int] = {}
    bad = []
    for name, text in failed.items():
        key = next((key for key in suite.known if key in name), None)
        print(f"FAILED {name}\n{text if key is None else suite.known[key]}", flush=True)
        if key is None:
            bad.append(f"{suite.client}: {name}")
        else:
            explained[key] = explained.get(key, 0) + 1
    reasons = [
        f"`{key}`{f' ({number})' if number > 1 else ''}: {suite.known[key]}"
        for key, number in explained.items()
    ]
    reasons += [f"left out, `{key}`: {why}" for key, why in suite.left_out.items()]
    if not counts["passed"] and not bad:
        bad.append(f"{suite.client}: no test passed")
    cells = (f"{suite.client}: {suite.what}", version(suite), ranks)
    numbers = (counts[outcome] for outcome in ("passed", "failed", "skipped"))
    row = " | ".join(map(str, (*cells, *numbers, "; ".join(reasons))))
    return f"| {row} |", bad


def write(rows: list[str]) -> None:
    """Replaces these rows in the page's table, or adds them."""
    text = PAGE.read_text()
    for row in rows:
        key = "|".join(cell for i, cell in enumerate(row.split("|")) if i in (0, 1, 3))
        lines = text.splitlines()
        same = [
            line
            for line in lines
            if "|".join(cell for i, cell in enumerate(line.split("|")) if i in (0, 1, 3)) == key
        ]
        if same:
            text = text.replace(same[0], row)
        else:
            last = max(i for i, line in enumerate(lines) if line.startswith("|"))
            text = "\n".join([*lines[: last + 1], row, *lines[last + 1 :]]) + "\n"
    PAGE.write_text(text)


def main() -> int:
    """1 where something has failed that is not known."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    every = all_suites()
    names = sorted({suite.client for suite in every})
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="those of CI")
    parser.add_argument("--install", action="store_true", help="make the environments only")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("-k", default="", metavar="PATTERN")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/clients.md")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(names):
        parser.error(f"no client {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if options.write and options.k:
        parser.error("--write takes whole suites: leave -k out")
    wanted = [s for s in every if s.client in (options.clients or names)]
    if not options.clients:
        wanted = [s for s in wanted if not s.repository and s.quick >= options.quick]
    rows: list[str] = []
    bad: list[str] = []
    for suite in wanted:
        if options.install:
            environment(suite)
            continue
        for ranks in [options.ranks] if options.ranks else suite.ranks:
            start = time.monotonic()
            row, unexplained = report(suite, ranks, run(suite, ranks, options.k))
            rows.append(row)
            bad += unexplained
            print(f"{row} {time.monotonic() - start:.0f} s", flush=True)
    print("\n".join(rows))
    if options.write:
        write(rows)
    print(f"unexplained: {bad}" if bad else f"{len(rows)} suites as expected")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
