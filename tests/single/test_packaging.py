# SPDX-License-Identifier: Apache-2.0
"""The recipes in packaging/ say what pyproject.toml says, and `make train` asks for no more than it
needs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import farandole

ROOT = Path(__file__).resolve().parents[2]
CONDA = ROOT / "packaging" / "conda" / "recipe.yaml"
SPACK = ROOT / "packaging" / "spack" / "package.py"
EASYBUILD = sorted((ROOT / "packaging" / "easybuild").glob("*.eb"))
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = re.findall(r'^version = "(.+)"$', PROJECT, re.MULTILINE)[0]


def requirements(key: str) -> dict[str, str]:
    """The least version of each."""
    listed = re.findall(rf"^{key} = \[(.*)\]$", PROJECT, re.MULTILINE)[0]
    return dict(re.findall(r'"([\w-]+)(?:>=([\d.]+))?"', listed))


@pytest.mark.parametrize("key", ["requires", "dependencies"])
def test_conda_and_spack_need_what_pip_needs(key: str) -> None:
    conda, spack = CONDA.read_text(), SPACK.read_text()
    listed = requirements(key)
    assert len(listed) >= 3
    for name, least in listed.items():
        assert re.search(rf"^ +- {name}{least and f' >={re.escape(least)}'}$", conda, re.MULTILINE)
        build = "" if name in ("cmake", "ninja") else "py-"
        assert f'depends_on("{build}{name}{least and f"@{least}:"}"' in spack, name


def test_each_recipe_has_the_version() -> None:
    (easyconfig,) = EASYBUILD
    assert easyconfig.name.startswith(f"farandole-{VERSION}-")
    assert f"\nversion = '{VERSION}'\n" in easyconfig.read_text()
    assert f'\n  version: "{VERSION}"\n' in CONDA.read_text()
    assert f'\n    version("{VERSION}")\n' in SPACK.read_text()
    assert f"/farandole-{VERSION}.tar.gz" in SPACK.read_text()


def test_they_need_the_same_python() -> None:
    (least,) = re.findall(r'^requires-python = ">=(.+)"$', PROJECT, re.MULTILINE)
    assert f"- python >={least}\n" in CONDA.read_text()
    assert f'"python@{least}:"' in SPACK.read_text()


def test_the_container_asks_for_extras_that_exist() -> None:
    extras = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    exist = set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    asked = re.findall(r"whl\)\[([\w,]+)\]", (ROOT / "Dockerfile").read_text())
    assert asked
    assert {name for each in asked for name in each.split(",")} <= exist


def commands(*words: str, folder: Path) -> str:
    """The commands that make would run on a fresh machine."""
    make = ["make", "-n", f"VENV={folder}", *words]
    return subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_training_installs_and_builds_no_tests(tmp_path: Path) -> None:
    told = commands("train", folder=tmp_path)
    assert "requirements/run.txt" in told
    assert "mpirun -np 2 python examples/torch_digits.py" in told
    unneeded = ("test.txt", "lint.txt", "docs.txt", "FARANDOLE_TESTS=ON")
    assert not [name for name in unneeded if name in told]
    assert told.count("echo ") >= 4, "a line for each step"
    developing = commands("venv", "programs", folder=tmp_path)
    assert all(name in developing for name in ("run.txt", "test.txt", "lint.txt"))
    assert "FARANDOLE_TESTS=ON" in developing


def test_an_editable_install_shows_files_where_they_are() -> None:
    """Tracebacks as well: not the links of build/mypy, which is what editors see."""
    if not Path(farandole.__path__[0]).is_relative_to(ROOT / "build" / "mypy"):
        pytest.skip("not an editable install of this tree")
    for name, file in {
        "farandole": "pyruntime/__init__.py",
        "farandole.runtime": "pyruntime/runtime.py",
        "farandole.start.bootstrap": "pyruntime/start/bootstrap.py",
        "farandole.c10d": "adapters/c10d/__init__.py",
        "farandole.extras": "extras/__init__.py",
    }.items():
        found = importlib.util.find_spec(name)
        assert found
        assert found.origin == str(ROOT / file)
        assert importlib.import_module(name).__file__ == found.origin


def test_each_package_is_pinned_once() -> None:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    lines = [x for file in files if file.stem != "docs" for x in file.read_text().splitlines()]
    pins = [line for line in lines if not line.startswith("#")]
    assert not [pin for pin in pins if not re.fullmatch(r"[\w-]+==[\w.]+", pin)]
    assert len({pin.partition("==")[0].lower() for pin in pins}) == len(pins)
