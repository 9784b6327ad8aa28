# SPDX-License-Identifier: Apache-2.0
"""The recipes in packaging/ say what pyproject.toml says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
