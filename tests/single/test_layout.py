# SPDX-License-Identifier: Apache-2.0
"""The rules that keep the tree a diagram: includes, what farandole.h may hold, sizes, licences."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cffi
import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LIBRARY = ROOT / "build" / "release" / "libfarandole.so"
MOST_LINES = 400
SOURCES = {".h", ".cc", ".cu", ".py", ".toml", ".cmake"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__"}

# Files of core/ that every room may use; the rest of core/ is the runtime, which puts the rooms
# together and which no room knows.
FOUNDATION = {
    "build_id",
    "config",
    "dimensions",
    "error",
    "log",
    "topology",
    "tuning",
    "types",
}
# Room -> rooms whose headers it may include, beside its own. "" is csrc/ itself: the C ABI.
MAY_INCLUDE = {
    "foundation": set(),
    "runtime": {"", "foundation", "kernels", "lib", "control", "data", "watch"},
    "kernels": {"foundation"},
    "lib": {"foundation"},
    "control": {"foundation", "kernels", "lib"},
    "data": {"foundation", "kernels", "lib"},
    "watch": {"foundation", "lib"},
    "compat": set(),
    "": {"foundation", "runtime"},
}
# Parts of the package that describe a framework's arrays; none knows another.
ADAPTERS = {"torch", "numpy", "cupy"}


def sources() -> list[Path]:
    """Every source file of the repository that is not built or installed."""
    folders = ["csrc", "pyruntime", "adapters", "tests", "examples", "benchmarks", "tools"]
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found += [ROOT / name for name in ("setup.py", "Makefile", "pyproject.toml", ".ci/run")]
    kept = SOURCES | {".txt", ""}
    return sorted(
        path
        for path in found
        if path.suffix in kept
        and not path.is_symlink()
        and not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)
        and (path.suffix != "" or path.name in {"Makefile", "run"})
    )


def includes(path: Path) -> Iterator[str]:
    yield from re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)


def room(path: Path) -> str:
    """The room of a path relative to csrc/."""
    if path.parts[0] == "core":
        return "foundation" if path.stem in FOUNDATION else "runtime"
    return path.parts[0] if len(path.parts) > 1 else ""


def core_files() -> list[Path]:
    return [path for path in sources() if CSRC in path.parents and path.suffix in {".h", ".cc"}]


def test_includes_follow_the_diagram() -> None:
    wrong = []
    for path in core_files():
        here = room(path.relative_to(CSRC))
        for header in includes(path):
            assert (CSRC / header).exists(), f"{path}: {header} is not relative to csrc/"
            there = room(Path(header))
            if there != here and there not in MAY_INCLUDE[here]:
                wrong.append(f"{path.relative_to(CSRC)} ({here}) includes {header} ({there})")
    assert not wrong, "\n".join(wrong)


def test_control_and_data_never_meet() -> None:
    assert "data" not in MAY_INCLUDE["control"]
    assert "control" not in MAY_INCLUDE["data"]


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of what the file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_runtime_knows_no_framework_at_import() -> None:
    """pyruntime may reach an adapter or a framework lazily (inside a function), never on import."""
    for path in (ROOT / "pyruntime").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in {"torch", "cupy", "mpi4py"}, path
                assert name.split(".")[:2][-1] not in ADAPTERS or name == "numpy", path


def test_adapters_do_not_know_each_other() -> None:
    for adapter in ADAPTERS:
        for path in (ROOT / "adapters" / adapter).rglob("*.py"):
            for name in imported_modules(path):
                parts = name.split(".")
                other = parts[0] == "farandole" and parts[1:2] and parts[1] in ADAPTERS - {adapter}
                assert not other, f"{path} imports {name}"


def test_adapters_never_reach_the_library() -> None:
    for path in (ROOT / "adapters").rglob("*.py"):
        assert not {"cffi", "ctypes"} & set(imported_modules(path)), path


def test_adapters_are_not_importable_as_frameworks() -> None:
    """`import torch` must find PyTorch: nothing makes adapters/ a package or path entry."""
    assert not (ROOT / "adapters" / "__init__.py").exists()
    import torch

    assert ROOT not in Path(torch.__file__).parents or ".venv" in torch.__file__


def test_header_is_what_cffi_reads() -> None:
    text = (CSRC / "farandole.h").read_text()
    directives = set(re.findall(r"^\s*#\s*(.+)$", text, re.MULTILINE))
    assert all(re.fullmatch(r"define [A-Z0-9_]+ -?\d+\s*(/\*.*)?", d) for d in directives), (
        directives
    )
    cffi.FFI().cdef(text)


def test_library_exports_the_header_and_nothing_else() -> None:
    code = re.sub(r"/\*.*?\*/", "", (CSRC / "farandole.h").read_text(), flags=re.DOTALL)
    functions = set(re.findall(r"\b(farandole_\w+)\s*\(", code))
    assert functions
    table = subprocess.check_output(["nm", "-D", "--defined-only", LIBRARY], text=True)
    assert {line.split()[-1] for line in table.splitlines()} == functions


def test_library_runs_on_glibc_2_28() -> None:
    """As the wheel's tag says; csrc/compat holds the cure for a newer name."""
    table = subprocess.check_output(["objdump", "-T", LIBRARY], text=True)
    needed = re.findall(r"\(GLIBC_(\d+)\.(\d+)[\d.]*\)\s+(\w+)", table)
    assert needed
    newer = [name for major, minor, name in needed if (int(major), int(minor)) > (2, 28)]
    assert not newer, f"add FORWARD({newer[0]}) to csrc/compat/glibc_forward.S: {newer}"
    assert "GLIBCXX" not in table


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines, "an empty file"
    first = 1 if lines[0].startswith("#!") else 0
    assert "SPDX-License-Identifier: Apache-2.0" in lines[first], "no licence line at the top"
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines: one noun a file, at most {MOST_LINES}"
