# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ core by CMake beside the package; all that is declarative is in pyproject.toml."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
RELEASE = ROOT / "build" / "release"
SHIPPED = [RELEASE / "libfarandole.so", ROOT / "csrc" / "farandole.h"]
OLDEST_GLIBC = (2, 28)


class BuildCore(Command):
    """libfarandole.so and farandole.h into `farandole/lib/`: copies, or links when editable."""

    description = "build the C++ core"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False
    build_lib: str | None = None

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        # Configured anew: the last cmake and ninja may have been those of pip's isolated build.
        ninja = f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"
        run("cmake", "-G", "Ninja", ninja, "-S", str(ROOT / "csrc"), "-B", str(RELEASE))
        jobs = os.environ.get("JOBS", str(os.cpu_count() or 1))
        run("cmake", "--build", str(RELEASE), "-j", jobs, "-t", "farandole")
        folder = ROOT / "pyruntime" / "lib" if self.editable_mode else self._lib_folder()
        folder.mkdir(parents=True, exist_ok=True)
        for source in SHIPPED:
            target = folder / source.name
            target.unlink(missing_ok=True)
            if self.editable_mode:
                target.symlink_to(os.path.relpath(source, folder))
            else:
                shutil.copy(source, target)

    def _lib_folder(self) -> Path:
        assert self.build_lib is not None
        return Path(self.build_lib) / "farandole" / "lib"

    def get_source_files(self) -> list[str]:
        return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file())

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [str(self._lib_folder() / p.name) for p in SHIPPED]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_core", None)]


class PlatformDistribution(Distribution):
    """Belongs to one machine type, though no extension module is compiled."""

    def has_ext_modules(self) -> bool:
        return True


class BdistWheel(bdist_wheel):
    """One wheel for every Python: the library is opened by cffi, not compiled against Python."""

    def get_tag(self) -> tuple[str, str, str]:
        major, minor = max(OLDEST_GLIBC, needed_glibc())
        return "py3", "none", f"manylinux_{major}_{minor}_{platform.machine()}"


def run(*command: str) -> None:
    """Output goes where pip's does; a failure ends the build."""
    subprocess.check_call(command)


def needed_glibc() -> tuple[int, int]:
    """The newest glibc symbol version that the built library asks for.

    An editable install asks before anything is built, and its tag is never looked at again.
    """
    if not SHIPPED[0].exists():
        return OLDEST_GLIBC
    table = subprocess.check_output(["objdump", "-T", str(SHIPPED[0])], text=True)
    versions = re.findall(r"\(?GLIBC_(\d+)\.(\d+)", table)
    return max((int(major), int(minor)) for major, minor in versions)


setup(
    cmdclass={"build": Build, "build_core": BuildCore, "bdist_wheel": BdistWheel},
    distclass=PlatformDistribution,
)
