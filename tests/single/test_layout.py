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
MOST_LINES, MOST_HEADER_LINES = 600, 300
SOURCES = {".h", ".cc", ".cu", ".py", ".toml", ".cmake"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__"}

# The ladder of docs/architecture.md. Room -> the rooms whose headers it may include beside its
# own; "lib/" is every room below lib. A row names rows above it only, so the folders have no cycle.
# "" is csrc/ itself: farandole.h.
LADDER = {
    "": (),
    "compat": (),
    "base": ("",),
    "kernels": ("base",),
    "lib/os": ("base",),
    "lib/ipc": ("base", "lib/os"),
    "lib/net": ("base", "lib/os", "lib/ipc"),
    "lib/mpi": ("base", "lib/os"),
    "lib/gpu": ("base", "lib/os"),
    "lib/xla": (),
    "control/protocol": ("base",),
    "control/channel": ("base", "lib/", "control/protocol"),
    "control/bootstrap": ("base", "lib/", "control/protocol"),
    "control/calls": ("base", "kernels", "control/protocol"),
    "control/coordinator": ("base", "kernels", "control/protocol", "control/calls"),
    "control/hosts": ("base", "lib/os", "control/"),
    "data/backend": ("base", "kernels"),
    "data/shm": ("base", "kernels", "lib/", "data/backend"),
    "data/hierarchical": ("base", "kernels", "lib/", "data/backend", "data/shm"),
    "data/gpu": ("base", "kernels", "lib/", "data/backend"),
    "data/nccl": ("base", "lib/", "data/backend", "data/gpu"),
    "watch": ("base", "lib/"),
    "runtime/calls": ("base", "kernels", "lib/", "control/", "data/backend", "data/shm", "watch"),
    "runtime/gpu": ("base", "lib/", "control/protocol", "data/"),
    "runtime": ("base", "lib/", "control/", "data/", "watch", "runtime/"),
    "api": ("base", "lib/os", "lib/xla", "watch", "runtime"),
}
# The same of the Python package: rooms, and the modules beside them. Each imports only what stands
# before it, at once and within functions; "__init__" is the package, `import farandole`.
PYTHON_LADDER = (
    *(
        "errors",
        "membership",
        "_library",
        "trust",
        "xla",
        "config",
        "compression",
        "topology",
        "members",
        "start",
        "installed",
        "output",
    ),
    *("arrays", "trees", "commits", "calls", "observe"),
    *("ops", "messages", "objects", "process_sets"),
    *("equality", "agreement"),
    *("adasum", "parameters", "runtime", "features", "worlds", "handlers", "elastic", "launch"),
    *("extras", "shared", "__init__"),
    *("as_horovod", "tools", "__main__"),
)
# Parts of the package that describe a framework's arrays; none knows another.
ADAPTERS = {"torch", "numpy", "cupy", "jax", "tensorflow"}

FRAMEWORKS = {"torch", "cupy", "jax", "keras", "mpi4py", "tensorflow"}  # imported late


def sources() -> list[Path]:
    """Every source file of the repository that is not built or installed."""
    folders = [
        "csrc",
        "pyruntime",
        "adapters",
        "extras",
        "tests",
        "examples",
        "benchmarks",
        "tools",
    ]
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
    folder = path.parent.as_posix()
    return "" if folder == "." else folder


def rooms_of(word: str) -> set[str]:
    """What a word in a row of LADDER stands for."""
    return {name for name in LADDER if name == word or (word[-1:] == "/" and name.startswith(word))}


def core_files() -> list[Path]:
    return [path for path in sources() if CSRC in path.parents and path.suffix in {".h", ".cc"}]


def test_the_ladder_has_no_cycle() -> None:
    above: set[str] = set()
    for name, words in LADDER.items():
        for word in words:
            stands_for = rooms_of(word) - {name}
            assert stands_for, f"{name}: there is no room {word}"
            assert stands_for <= above, f"{name} may include {word}, which stands beside or on it"
        above.add(name)


def test_includes_follow_the_ladder() -> None:
    wrong, used = [], set()
    for path in core_files():
        here = room(path.relative_to(CSRC))
        assert here in LADDER, f"{path}: give its folder a row in LADDER"
        for header in includes(path):
            assert (CSRC / header).exists(), f"{path}: {header} is not relative to csrc/"
            there = room(Path(header))
            used.add((here, there))
            if there != here and not any(there in rooms_of(word) for word in LADDER[here]):
                wrong.append(f"{path.relative_to(CSRC)} ({here}) includes {header} ({there})")
    assert not wrong, "\n".join(wrong)
    idle = [
        f"{name} includes nothing from '{word}': narrow its row"
        for name, words in LADDER.items()
        for word in words
        if not any((name, there) in used for there in rooms_of(word))
    ]
    assert not idle, "\n".join(idle)


def test_control_data_and_watch_never_meet() -> None:
    tops = {"control", "data", "watch"}
    for name, words in LADDER.items():
        here = name.split("/")[0]
        for word in words:
            there = word.split("/")[0]
            assert not ({here, there} <= tops and here != there), f"{name} may include {word}"


def test_collectives_and_dtypes_are_asked_for_traits() -> None:
    """What holds of some of them is a column in base/; nobody compares or lists their values."""
    known = {"Op": "base/collective.h", "DType": "base/dtype.h", "ReduceOp": "base/reduce_op.h"}
    for path in core_files():
        relative = path.relative_to(CSRC).as_posix()
        text = path.read_text()
        ordinal = re.search(r"[<>]=?\s*(Op|DType|ReduceOp)::k", text)
        assert not ordinal, f"{relative} compares by order: {ordinal and ordinal[0]}"
        for enum, table in known.items():
            listed = re.search(rf"(==|!=) {enum}::k\w+\s*(\|\||&&)[^;]*[=!]= {enum}::k", text)
            assert not listed, f"{relative} lists values of {enum}: give {table} a column"
            cases = len(re.findall(rf"case {enum}::k", text))
            owner = (enum, relative) == ("ReduceOp", "kernels/kernels.cc")  # its loops
            assert cases == 0 or owner, f"{relative} switches over {enum}: ask {table}"


def test_a_class_is_defined_in_one_file() -> None:
    definition = re.compile(r"^(?=\S)(?:[\w:<>,&*\[\] ]+ [&*]?)?(\w+)::~?\w+\(", re.MULTILINE)
    files: dict[str, set[str]] = {}
    for path in core_files():
        relative = path.relative_to(CSRC).as_posix()
        text = path.read_text()
        if path.suffix == ".cc":
            space = re.search(r"^namespace ([\w:]+)", text, re.MULTILINE)
            for name in definition.findall(text):
                files.setdefault(f"{space and space[1]}::{name}", set()).add(relative)
    for name, defined in files.items():
        assert len(defined) == 1, f"{name} is defined in {sorted(defined)}"


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of what the file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_files() -> list[Path]:
    files = (ROOT / "pyruntime").rglob("*.py")
    return [path for path in files if "path" not in path.parts]  # what stands in for Horovod's


def test_python_imports_follow_the_ladder() -> None:
    rung = {name: number for number, name in enumerate(PYTHON_LADDER)}
    for path in python_files():
        parts = path.relative_to(ROOT / "pyruntime").with_suffix("").parts
        assert parts[0] in rung, f"{path}: give it a place in PYTHON_LADDER"
        for name in imported_modules(path):
            there = [*name.split("."), "__init__"][1]
            if name.split(".")[0] == "farandole" and there != parts[0]:
                allowed = rung.get(there, len(rung)) < rung[parts[0]]
                assert allowed, f"{path.relative_to(ROOT)} imports {name}, which stands on it"


def test_extras_stand_below_the_package() -> None:
    """So the package can import them; none knows another."""
    rung = {name: number for number, name in enumerate(PYTHON_LADDER)}
    for path in (ROOT / "extras").rglob("*.py"):
        whose = path.relative_to(ROOT / "extras").with_suffix("").parts[0]
        for name in imported_modules(path):
            if name.split(".")[0] != "farandole":
                continue
            there = [*name.split("."), "__init__"][1]
            if there == "extras":
                assert name.startswith(f"farandole.extras.{whose}."), f"{path} imports {name}"
            else:
                below = there == "torch" or rung.get(there, len(rung)) < rung["extras"]
                assert below, f"{path} imports {name}, which stands on it"


def test_the_core_names_no_extra() -> None:
    show = {ROOT / "pyruntime/shared.py", ROOT / "adapters/torch/__init__.py"}
    for path in {*python_files(), *(ROOT / "adapters").rglob("*.py")} - show:
        named = [name for name in imported_modules(path) if name.startswith("farandole.extras")]
        assert not named, f"{path} imports {named}"


def test_runtime_knows_no_framework_at_import() -> None:
    """pyruntime may reach an adapter or a framework lazily (inside a function), never on import."""
    for path in python_files():
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in FRAMEWORKS, path
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
    inner = path.suffix == ".h" and CSRC in path.parents and path.parent != CSRC
    most = MOST_HEADER_LINES if inner else MOST_LINES
    assert len(lines) <= most, f"{len(lines)} lines: one noun a file, at most {most}"


OPENING = {".h": "//", ".cc": "//", ".cu": "//", ".py": '"""'}


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if path.suffix in OPENING and path.name != "__init__.py"],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_a_file_says_what_it_is(path: Path) -> None:
    """Before any code. A pair of header and source says it once, in the header."""
    if path.suffix == ".cc" and opening_header(path):
        return
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    assert lines[1].startswith((OPENING[path.suffix], "/*")), f"{path}: what is it?"


def opening_header(path: Path) -> bool:
    """Whether the source's header, its first include, is there: x.h for x.cc and x_test.cc."""
    first = next(includes(path), "")
    found = any((folder / first).is_file() for folder in (CSRC, ROOT / "tests/csrc", path.parent))
    return found and path.stem.startswith(Path(first).stem)
