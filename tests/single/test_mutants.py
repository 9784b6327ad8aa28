# SPDX-License-Identifier: Apache-2.0
"""The operators of tools/mutate.py: what they change, what they leave alone, and who judges it."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of tools/, which is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module
    for name in ("mutants", "mutant_checks", "mutate", "ran_lines"):
        sys.modules.pop(name, None)


def changed(tool: Any, path: str, source: str) -> set[tuple[str, str]]:
    """(kind, new text of the lines that differ, in one line), for all mutants."""
    found = set()
    for mutant in tool("mutants").mutants(path, source):
        lines = zip(source.splitlines(), mutant.apply(source).splitlines(), strict=False)
        found.add((mutant.kind, " ".join(new.strip() for old, new in lines if new != old)))
    return found


CPP = r"""
// a == b && 1
#include "1.h"
template <class T>
int f(const std::vector<T>& v, bool on) {
  static_assert(sizeof(T) == 4);
  std::vector<int> kept(v.size());
  const char* text = "a < 1" + name;
  if (v.size() < 10u && !on) return 0;
  if (ready(v)) counter += 2;
  log("x", 'y');
  for (int i = 0; more(i); next(i)) times = {sum(i), {end(i), 2}};
  return std::min<int>(v[i - 1], true);
}
"""


def test_of_cpp(tool: Any) -> None:
    assert changed(tool, "x.cc", CPP) == {
        ("comparison", "if (v.size() <= 10u && !on) return 0;"),
        ("constant", "if (v.size() < 11u && !on) return 0;"),
        ("logic", "if (v.size() < 10u || !on) return 0;"),
        ("logic", "if (v.size() < 10u && on) return 0;"),
        ("constant", "if (v.size() < 10u && !on) return 1;"),
        ("condition", "if (!(ready(v))) counter += 2;"),
        ("arithmetic", "if (ready(v)) counter -= 2;"),
        ("constant", "if (ready(v)) counter += 3;"),
        ("statement", "if (ready(v)) (void)0;"),
        ("statement", "(void)0;"),
        ("constant", "for (int i = 1; more(i); next(i)) times = {sum(i), {end(i), 2}};"),
        ("constant", "for (int i = 0; more(i); next(i)) times = {sum(i), {end(i), 3}};"),
        ("statement", "for (int i = 0; more(i); next(i)) (void)0;"),
        ("word", "return std::max<int>(v[i - 1], true);"),
        ("arithmetic", "return std::min<int>(v[i + 1], true);"),
        ("constant", "return std::min<int>(v[i - 2], true);"),
        ("word", "return std::min<int>(v[i - 1], false);"),
    }


PYTHON = '''
"""1 and 2"""
LIMIT = 1_000  # 1 + 1
def f(x, *rest):
    "not this"
    text = f"{x == 1}" + x
    if x is None or x not in rest:
        raise ValueError("3")
    elif ready(x):
        self.count[0] = LIMIT * 2
        a, b = x
    send(x)
'''


def test_of_python(tool: Any) -> None:
    assert changed(tool, "x.py", PYTHON) == {
        ("constant", "LIMIT = 1001  # 1 + 1"),
        ("logic", "if x is not None or x not in rest:"),
        ("logic", "if x is None and x not in rest:"),
        ("logic", "if x is None or x  in rest:"),
        ("statement", "pass"),
        ("condition", "elif not (ready(x)):"),
        ("constant", "self.count[1] = LIMIT * 2"),
        ("constant", "self.count[0] = LIMIT * 3"),
        ("arithmetic", "self.count[0] = LIMIT + 2"),
    }
    kinds = [mutant.kind for mutant in tool("mutants").mutants("x.py", PYTHON)]
    assert kinds.count("statement") == 3  # the error, the assignment to what was there, the call


def test_python_can_parse_them(tool: Any) -> None:
    """What it cannot would count as killed."""
    path = ROOT / "adapters" / "torch" / "gradients" / "gradient.py"
    source = path.read_text()
    found = tool("mutants").mutants(path.name, source)
    assert len(found) > 100
    for mutant in found[::5]:
        assert mutant.apply(source) != source
        ast.parse(mutant.apply(source))


def test_every_file_has_checks_that_exist(tool: Any) -> None:
    mutate, table = tool("mutate"), tool("mutant_checks")
    for check in {check for checks in table.CHECKS.values() for check in checks}:
        words = check.split()
        if mutate._is_program(check):
            assert list((ROOT / "tests" / "csrc").rglob(f"{words[0]}.cc")), check
        else:
            assert all((ROOT / word).exists() for word in words), check
    files = list((ROOT / "csrc").rglob("*.cc"))
    for prefix in table.CHECKS:
        assert any(path.as_posix().startswith(f"{ROOT}/{prefix}") for path in files), prefix
    assert table.checks_of("csrc/data/nccl/x.cc") == table.CHECKS["csrc/data/nccl"]


def test_python_is_judged_by_the_tests_that_run_its_line(tool: Any) -> None:
    checks = tool("ran_lines").checks
    seconds = {"slow": 50.0, "quick": 1.0, "middle": 9.0, "late": 30.0}
    lines = {1: [""], 2: ["slow", "quick", "failed", "late"], 3: ["middle", "late"], 4: ["failed"]}
    assert checks(lines, 2, seconds, 60.0) == ["late", "quick"]  # late runs most; 60 s are over
    assert checks(lines, 3, seconds, 60.0) == ["late", "middle"]
    assert checks(lines, 2, {"slow": 90.0}, 60.0) == ["slow"]  # but one at least
    assert checks(lines, 1, seconds, 90.0) == ["late", "quick middle slow"]  # run at import
    assert checks(lines, 5, seconds, 60.0) == []


def test_scores_count_what_compiles(tool: Any) -> None:
    mutate, mutants = tool("mutate"), tool("mutants")
    fates = ["killed", "killed", "killed", "lives", "invalid"]
    found = [
        mutate.Judgement(mutants.Mutant("adapters/x.py", i, i + 1, "", "logic"), fate)
        for i, fate in enumerate(fates)
    ]
    lines = mutate.table(found).splitlines()
    assert lines[-1].split() == ["all", "3", "1", "1", "75%"]
    assert lines[-2].split() == ["adapters", "3", "1", "1", "75%"]
