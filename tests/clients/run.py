#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects over farandole, unmodified.

    make test-clients ARGS="[CLIENT...] [--ranks N] [-k PATTERN] [--write]"

Each client's release comes from the package index into an environment of its own in build/clients,
with its tests, from the package or its sdist; nothing is fetched as they run. Suites that only
repositories have run from a copy outside: CLIENT_SOURCE=folder. `--write` puts the table into
docs/clients.md. Ends with 1 if a test fails that `known` does not explain.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from farandole.as_horovod import FOLDER  # noqa: E402
from harness.mpirun import mpirun  # noqa: E402
from harness.process import JobError  # noqa: E402

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "clients.md"
Outcomes = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Suite:
    """Tests of one client. In `arguments`, {source} is where its sdist or repository lies."""

    client: str  # the package
    what: str
    packages: tuple[str, ...]  # for pip; the first is the client, unless it is a repository
    mode: str  # of in_rank.py, as `runner`
    runner: str
    arguments: tuple[str, ...]
    ranks: tuple[int, ...] = (2,)
    select: str = ""  # of pytest's -k
    sdist: bool = False
    repository: bool = False  # {source} is CLIENT_SOURCE
    launched: bool = True  # by mpirun; False: the suite starts its ranks itself
    environment: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)  # what fails or is left out -> why
    seconds: int = 600


_ALONE = ("--noconftest", "-c", os.devnull)
_OWN_ROOT = ("-c", os.devnull, "--rootdir={source}")
_SCRIPTS = "accelerate.test_utils.scripts"
SUITES = (
    Suite(
        "pytorch-optimizer",
        "all optimizers of torch and of five packages, plain and sharded",
        (
            *("pytorch-optimizer==4.1.0", "torch-optimizer==0.3.0", "schedulefree==1.4.1"),
            *("prodigyopt==1.1.2", "lion-pytorch==0.2.5"),
        ),
        "init",
        "pytest",
        (*_ALONE, str(HERE / "optimizers.py")),
        known={
            "Prodigy-sharded": "one distance of all parameters: MismatchError at step()",
            "LoRARite-sharded": "its step fails on pieces, which are vectors, with its own error",
        },
    ),
    Suite(
        "accelerate",
        "its own test scripts, on DDP",
        ("accelerate==1.15.0",),
        "group",
        "modules",
        (
            f"{_SCRIPTS}.test_script",
            f"{_SCRIPTS}.test_ops",
            f"{_SCRIPTS}.test_sync",
            f"{_SCRIPTS}.test_distributed_data_loop",
        ),
        environment={"ACCELERATE_USE_CPU": "1"},
    ),
    Suite(
        "mpi4py",
        "its tests of collectives and messages, after farandole.init()",
        ("mpi4py==4.1.2",),
        "init",
        "pytest",
        (*_OWN_ROOT, "{source}/test"),
        select="cco or p2p",
        sdist=True,
    ),
    Suite(
        "pytorch-ignite",
        "its tests of Horovod",
        ("pytorch-ignite==0.5.5", "scikit-learn==1.9.1"),
        "horovod",
        "pytest",
        (
            *_OWN_ROOT,
            "{source}/tests/ignite/distributed",
            "{source}/tests/ignite/handlers/test_early_stopping.py",
        ),
        ranks=(4,),  # what the tests themselves start
        select="hvd or horovod",
        sdist=True,
        launched=False,
        known={"test_auto_methods_hvd": "looks for Horovod's private `_allreduce_grad_async`"},
        seconds=900,
    ),
    Suite(
        "pytorch-ignite",
        "its tests of torch.distributed, gloo's name replaced",
        ("pytorch-ignite==0.5.5", "scikit-learn==1.9.1"),
        "as_gloo",
        "pytest",
        (
            *_OWN_ROOT,
            *("--dist=each", "--tx={ranks}*popen//python={python}", "-m", "distributed"),
            "{source}/tests/ignite/distributed",
            "{source}/tests/ignite/handlers/test_early_stopping.py",
        ),
        select="not hvd and not horovod",
        sdist=True,
        launched=False,
        environment={"WORLD_SIZE": "{ranks}"},
        seconds=900,
    ),
    Suite(
        "horovod",
        "test_torch.py",
        ("mock",),
        "horovod",
        "pytest",
        ("-c", os.devnull, "{source}/test/parallel/test_torch.py"),
        repository=True,
        known={
            "test_broadcast_state": "torch's Muon, or state that only Horovod's step makes",
            "test_force_allreduce": "torch's Muon takes two-dimensional parameters only",
            "no_named_parameters": "reads Horovod's private _parameter_names",
            "duplicate_name": "the first call is done before the second, so it is no duplicate",
            "test_horovod_join_all": "wants zeros of joined ranks, or an error",
            "test_horovod_join_broadcast": "wants an error; the call completes here",
            "reducescatter_async_fused": "calls are done before it asks",
            "synchronize_step_warning": "wants a warning of step() after synchronize(), right here",
        },
    ),
)


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
    python, source = environment(suite), source_of(suite)
    fields = {"source": source, "ranks": ranks, "python": python}
    arguments = [text.format(**fields) for text in suite.arguments]
    if suite.runner == "pytest":
        left = " and ".join(f"not {name}" for name, why in suite.known.items() if "left out" in why)
        patterns = [f"({text})" for text in (suite.select, pattern) if text]
        chosen = " and ".join(filter(None, [left, *patterns]))
        arguments += ["-k", chosen] if chosen else []
    else:
        arguments = [name for name in arguments if pattern in name]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), str(HERE / "in_rank.py"), folder, suite.mode, suite.runner]
        own = {name: text.format(**fields) for name, text in suite.environment.items()}
        extra = {"OMP_NUM_THREADS": "1", **own}
        groups = Path(folder, "groups")
        if suite.mode == "as_gloo":
            extra["CLIENT_GROUPS"] = str(groups)
        if suite.mode == "horovod":  # as if installed, whatever PYTHONPATH a test sets
            extra["CLIENT_PATH"] = FOLDER
        here = Path.cwd()
        os.chdir(source or folder)
        try:
            number = ranks if suite.launched else 1
            result = mpirun([*command, *arguments], number, timeout=suite.seconds, env=extra)
            print(result.out[-4000:], flush=True)
        except JobError as hung:
            print(hung, flush=True)
            return {"the whole": ("failed", f"did not end within {suite.seconds} s")}
        finally:
            os.chdir(here)
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
    reasons, bad = [], []
    for name, (outcome, text) in found.items():
        why = next((why for key, why in suite.known.items() if key in name), None)
        if outcome == "failed":
            print(f"FAILED {name}\n{text if why is None else why}", flush=True)
            bad += [name] if why is None else []
    failed = {n for n, (outcome, _) in found.items() if outcome == "failed"}
    for key, why in suite.known.items():
        number = sum(key in name for name in failed)
        if number or "left out" in why:
            reasons.append(f"`{key}`{f' ({number})' if number > 1 else ''}: {why}")
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
    names = sorted({suite.client for suite in SUITES})
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(names))
    parser.add_argument("--ranks", type=int)
    parser.add_argument("-k", default="", metavar="PATTERN")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    wanted = [s for s in SUITES if s.client in (options.clients or names)]
    if not options.clients:
        wanted = [s for s in wanted if source_of(s) or not s.repository]
    rows: list[str] = []
    bad: list[str] = []
    for suite in wanted:
        for ranks in [options.ranks] if options.ranks else suite.ranks:
            row, unexplained = report(suite, ranks, run(suite, ranks, options.k))
            rows.append(row)
            bad += unexplained
            print(row, flush=True)
    print("\n".join(rows))
    if options.write:
        write(rows)
    print(f"{len(rows) - len(bad)} suites as expected" if not bad else f"unexplained: {bad}")
    return int(bool(bad) or not rows)


if __name__ == "__main__":
    sys.exit(main())
