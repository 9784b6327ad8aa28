#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Judges the tests: makes small wrong changes, mutants, and counts those that no test notices.

Works in build/mutate/tree, a copy of the tracked files. A mutant is killed if a test fails or takes
too long, twice. A mutant does not count if it does not compile, or if its check also fails without
it. tools/mutant_checks.py names the programs that judge C++. A Python mutant is judged by some of
the tests that run its line; if no test does, it lives. To find these tests, the first run of this
script with Python mutants watches all tests, which takes about 15 minutes.

build/mutate/results.jsonl keeps the judgements, which are not repeated. build/mutate/survivors has
a diff for each living mutant, build/mutate/killed the output of the check that has killed a mutant.

    tools/mutate.py                                   200 mutants of all the product
    tools/mutate.py --count 40 --only csrc/control    40 of one folder
    tools/mutate.py --again                           survivors, by the current tests
    tools/mutate.py --fresh                           start again, with the current sources
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy
import ran_lines
from mutant_checks import checks_of
from mutants import Mutant, mutants
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "mutate"
TREE = HOME / "tree"
RESULTS = HOME / "results.jsonl"
PASSED = HOME / "passed.json"
LINES = HOME / "lines"  # which tests run which Python lines
UNDER_TEST = HOME / "original.json"  # the original of the file that holds a mutant now
CORE = ("base", "kernels", "lib", "control", "data", "watch", "runtime", "api")  # in csrc
MUTATED = (*(f"csrc/{name}" for name in CORE), "pyruntime", "extras", "adapters")
ENOUGH_SECONDS = (
    400.0  # total of the tests chosen for a Python mutant; recorded in parallel, so slow
)
NEW_SECONDS = 300.0  # limit for a check that has not passed yet
ALONE_SECONDS = 30.0  # limit for each test of a program
# Warnings that mutants cause and that must not make the build fail.
_WARNINGS = "parentheses unused-parameter unused-variable unused-but-set-variable unused-function"
TOLERANT = "".join(
    f'#pragma GCC diagnostic ignored "-W{name}"\n'
    for name in f"{_WARNINGS} unused-value type-limits sign-compare".split()
)


@dataclass(frozen=True)
class Judgement:
    """The fate of a mutant: `invalid`, `killed` by a check, or `lives`."""

    mutant: Mutant
    fate: str
    by: str = ""
    seconds: float = 0.0

    @property
    def folder(self) -> str:
        """The folder in whose row of the table the mutant counts."""
        return next(folder for folder in MUTATED if self.mutant.path.startswith(f"{folder}/"))


def _run(command: Sequence[str], limit: float = math.inf, quiet: float = math.inf) -> int | None:
    """Exit code of a command in the tree. None if the command was ended after `limit` seconds, or
    after `quiet` seconds without output.
    """
    libraries = Path(numpy.__file__).parents[1] / "nvidia"
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FARANDOLE_TEST_MPI": str(Path(sys.prefix) / "lib" / "libmpi.so.40"),
        "FARANDOLE_TEST_NVRTC": next(map(str, libraries.glob("*/lib/libnvrtc.so.*")), ""),
    }
    with (HOME / "output").open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=TREE,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _wait(child, time.monotonic() + limit, quiet)
        finally:
            child.terminate()  # pytest then ends its jobs, and ninja its compilers
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _wait(child: subprocess.Popen[bytes], end: float, quiet: float) -> int | None:
    said, since = 0, time.monotonic()
    while child.poll() is None:
        now, size = time.monotonic(), (HOME / "output").stat().st_size
        if size != said:
            said, since = size, now
        if now > min(end, since + quiet):
            return None
        time.sleep(0.05)
    return child.returncode


def _ninja(target: str) -> bool:
    return _run(["ninja", "-C", "build/release", "-j", "2", "--quiet", target]) == 0


def _is_program(check: str) -> bool:
    return not check.startswith("tests/")


def _command(check: str) -> list[str]:
    words = check.split()
    if _is_program(check):
        return [f"build/release/tests/{words[0]}", "--stop", "first", *words[1:]]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--ranks", "2"]
    return [str(TREE / ".venv/bin/python"), "-m", "pytest", *options, *words]


def _built(check: str) -> bool:
    """True if the program of the check compiles; for pytest, if the core does."""
    return _ninja(check.split()[0] if _is_program(check) else "farandole")


def _passed() -> dict[str, float]:
    """Check -> seconds, for checks that have passed."""
    return dict(json.loads(PASSED.read_text())) if PASSED.exists() else {}


def _fails_again(check: str) -> bool:
    """True if the test fails or hangs again when it runs alone. No mutant is killed by chance."""
    pattern = r"^run  (\w+)$" if _is_program(check) else r"^FAILED (\S+)"
    ran = re.findall(pattern, (HOME / "output").read_text(), re.MULTILINE)
    alone = ran[-1] if ran else check
    if ran and _is_program(check):
        alone = check if "--" in check else f"{check.split()[0]} {ran[-1]}"
    return _run(_command(alone), ALONE_SECONDS if _is_program(check) else NEW_SECONDS) != 0


def _seconds(check: str) -> float | None:
    """Seconds that the check takes. None if the check, or one of its files, has not passed yet."""
    passed = _passed()
    parts = [check] if _is_program(check) else check.split()
    return sum(passed[part] for part in parts) if passed.keys() >= set(parts) else None


def _passes(check: str) -> bool:
    """Runs a check that has been built. Returns True if it passes."""
    start, expected = time.monotonic(), _seconds(check)
    limit = NEW_SECONDS if expected is None else 3 * expected + ALONE_SECONDS
    if _run(_command(check), limit, ALONE_SECONDS if _is_program(check) else limit) != 0:
        return False
    if expected is None:
        PASSED.write_text(json.dumps(_passed() | {check: time.monotonic() - start}, indent=1))
    return True


def restore() -> None:
    """Removes the mutant from the tree, even one that an earlier run has left there."""
    if UNDER_TEST.exists():
        path, source = json.loads(UNDER_TEST.read_text())
        (TREE / path).write_text(source)
        UNDER_TEST.unlink()


def _name(mutant: Mutant) -> str:
    return f"{mutant.path.replace('/', '-')}-{mutant.start}-{mutant.kind}"


@functools.cache
def _ran() -> dict[str, dict[int, list[str]]]:
    return ran_lines.by_line(LINES, TREE)


def _checks(mutant: Mutant, source: str) -> Sequence[str]:
    """Checks that may notice the mutant, quickest first; none if no test runs the mutant's line."""
    if mutant.path.endswith(".cc"):
        return checks_of(mutant.path)
    line = source.count("\n", 0, mutant.start) + 1
    return ran_lines.checks(_ran().get(mutant.path, {}), line, _passed(), ENOUGH_SECONDS)


def judge(mutant: Mutant) -> Judgement:
    """Puts the mutant into the tree, runs checks until one fails, then removes the mutant."""
    file, start = TREE / mutant.path, time.monotonic()
    source = file.read_text()
    fate, by = "lives", ""
    UNDER_TEST.write_text(json.dumps([mutant.path, source]))
    try:
        file.write_text((TOLERANT if file.suffix == ".cc" else "") + mutant.apply(source))
        for by in _checks(mutant, source):
            if file.suffix == ".cc" and not _built(by):
                fate = "invalid"
            elif not _passes(by) and _fails_again(by):
                fate = "killed"
                (HOME / "killed").mkdir(exist_ok=True)
                shutil.copy(HOME / "output", HOME / "killed" / f"{_name(mutant)}.txt")
            else:
                continue
            break
    finally:
        restore()
    # A check counts only if it has passed without a mutant.
    if fate == "killed" and _seconds(by) is None and not (_built(by) and _passes(by)):
        print(f"fails without a mutant: {by}\n{(HOME / 'output').read_text()[-4000:]}")
        fate = "invalid"
    return Judgement(mutant, fate, by, round(time.monotonic() - start, 1))


def _untested() -> tuple[str, ...]:
    """Adapters whose tests would be skipped in this environment."""
    return tuple(
        f"adapters/{name}/" for name in ("jax", "keras", "tensorflow") if not find_spec(name)
    )


def sample(only: Sequence[str], seed: int) -> list[Mutant]:
    """The mutants in these folders, in a random order that depends on `seed`."""
    files = [path for folder in MUTATED for path in sorted((TREE / folder).rglob("*.*"))]
    paths = [path.relative_to(TREE).as_posix() for path in files if path.suffix in (".cc", ".py")]
    paths = [path for path in paths if not path.startswith(_untested())]
    found = [mutant for path in paths for mutant in mutants(path, (TREE / path).read_text())]
    random.Random(seed).shuffle(found)
    return [mutant for mutant in found if mutant.path.startswith(tuple(only))]


def record_lines() -> None:
    """Records which tests of `make test` and `make test-jobs` run which Python lines."""
    if LINES.exists():
        return
    [site] = (TREE / ".venv" / "lib").glob("python*/site-packages")
    hook, settings = site / "ran_lines.pth", HOME / "coverage.ini"
    hook.write_text(ran_lines.HOOK.format(tools=ROOT / "tools"))
    settings.write_text(ran_lines.settings(LINES, TREE))
    LINES.mkdir()
    pytest = [f"COVERAGE_PROCESS_START={settings}", f"RAN_LINES_SECONDS={PASSED}"]
    pytest += [str(TREE / ".venv/bin/python"), "-m", "pytest", "-p", "ran_lines", "-q"]
    folders = [f"tests/{name}" for name in ("single", "faults", "jobs")]
    for options in (
        [*folders, "-n", "6", "--dist", "worksteal"],
        ["tests/parallel", "-n", "3", "--dist", "loadgroup", "--inner=-p ran_lines"],
    ):
        _run(["env", *pytest, *options])  # a file that fails here is not used as a check
        shutil.copy(HOME / "output", LINES / f"{options[0].replace('/', '-')}.txt")
    hook.unlink()
    _run([sys.executable, "-m", "coverage", "combine", "-q", f"--data-file={LINES}/lines"])


def prepare() -> None:
    """Creates the tree, with its own build and environment, or else updates its tests."""
    new = not (TREE / ".venv" / "ready").exists()
    kinds = ["--cached", "--others", "--exclude-standard"]
    listed = ["git", "ls-files", *kinds, *([] if new else ["tests", "pyproject.toml"])]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    if not new:
        return
    # The build does not configure again after changes, because the build id may stay.
    options = ["-DFARANDOLE_TESTS=ON", "-DCMAKE_SUPPRESS_REGENERATION=ON", "--log-level=WARNING"]
    for command in (
        ["cmake", "-G", "Ninja", "-S", "csrc", "-B", "build/release", *options],
        ["ninja", "-C", "build/release", "-j", "2", "--quiet", "farandole", "gpu_double"],
        ["cp", "-al", sys.prefix, ".venv"],
        ["make", "build/mypy"],
    ):
        if _run(command) != 0:
            sys.exit(f"{command}\n{(HOME / 'output').read_text()}")
    [site] = (TREE / ".venv" / "lib").glob("python*/site-packages")
    for link in site.glob("__editable__*"):
        link.unlink()
    (site / "farandole").symlink_to(TREE / "build" / "mypy" / "farandole")
    for name in ("libfarandole.so", "farandole.h"):
        folder = TREE / ("csrc" if name.endswith(".h") else "build/release")
        (TREE / "pyruntime" / "lib").mkdir(exist_ok=True)
        (TREE / "pyruntime" / "lib" / name).symlink_to(folder / name)
    program = TREE / ".venv" / "bin" / "farandole"
    text = program.read_text().replace(sys.prefix, str(TREE / ".venv"))
    program.unlink()  # it was a hard link to the checkout's file
    program.write_text(text)
    program.chmod(0o755)
    (TREE / ".venv" / "ready").touch()


def judged() -> dict[Mutant, Judgement]:
    """Judgements of earlier runs. If a mutant has several, the last one counts."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    all_ = [Judgement(**(one | {"mutant": Mutant(**one["mutant"])})) for one in found]
    return {judgement.mutant: judgement for judgement in all_}


def table(judgements: Sequence[Judgement]) -> str:
    """The numbers of killed, living and invalid mutants by folder."""
    lines = [f"{'folder':16} killed lives invalid score"]
    for folder in (*MUTATED, "all"):
        fates = [one.fate for one in judgements if folder in (one.folder, "all")]
        killed, lives = fates.count("killed"), fates.count("lives")
        score = f"{100 * killed / (killed + lives):4.0f}%" if killed + lives else "    -"
        lines.append(f"{folder:16} {killed:6} {lives:5} {fates.count('invalid'):7} {score}")
    return "\n".join(lines)


def write_survivors(judgements: Sequence[Judgement]) -> None:
    """Writes a diff for each living mutant."""
    folder = HOME / "survivors"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for one in judgements:
        if one.fate == "lives":
            path, source = one.mutant.path, (TREE / one.mutant.path).read_text()
            texts = (source.splitlines(True), one.mutant.apply(source).splitlines(True))
            (folder / f"{_name(one.mutant)}.diff").write_text(
                "".join(difflib.unified_diff(*texts, path, path))
            )


def main() -> None:
    """Parses options, then judges mutants and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="mutants to judge (200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order (1)")
    parser.add_argument("--only", nargs="+", default=MUTATED, metavar="FOLDER", help="folders")
    parser.add_argument("--again", action="store_true", help="judge survivors again")
    parser.add_argument("--fresh", action="store_true", help="forget tree and judgements")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    restore()
    if options.fresh:
        shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True, exist_ok=True)
    prepare()
    order = sample(options.only, options.seed)
    if any(mutant.path.endswith(".py") for mutant in order):
        record_lines()
    known, found = judged(), []
    with RESULTS.open("a") as log, tqdm(total=options.count, unit="mutant") as bar:
        for mutant in order:
            one = known.get(mutant)
            if one is None or (options.again and one.fate == "lives"):
                one = judge(mutant)
                print(json.dumps(asdict(one)), file=log, flush=True)
            found.append(one)
            bar.update(one.fate != "invalid")
            bar.set_postfix(lives=sum(other.fate == "lives" for other in found))
            if bar.n == options.count:
                break
    write_survivors(found)
    print(table(found))


if __name__ == "__main__":
    main()
