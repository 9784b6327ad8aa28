# SPDX-License-Identifier: Apache-2.0
"""Builds the package's C++ core with CMake. pyproject.toml declares everything else."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import cffi
from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.editable_wheel import _StaticPth, editable_wheel
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
DEVELOPMENT = ROOT / "build" / "release"  # the build of the Makefile; editable installs link to it
HEADER = ROOT / "csrc" / "farandole.h"
PARSED = "abi"  # name of Python source that pyruntime/_library.py reads
OLDEST_GLIBC = (2, 28)


def scratch() -> str:
    """A temporary folder that is removed when the process ends. Nothing stays in the sources."""
    folder = tempfile.mkdtemp(prefix="farandole-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_core", None)]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = scratch()


class EggInfo(egg_info):
    def initialize_options(self) -> None:
        super().initialize_options()
        self.egg_base = scratch()


class BuildCore(Command):
    """Builds libfarandole.so and farandole.h into `farandole/lib/`; an editable install links them.

    CC, CXX and CMAKE_ARGS select a cross compiler, as in CMake.
    """

    description = "build the C++ core"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False
    build_lib: str | None = None
    build_temp: str | None = None

    def initialize_options(self) -> None:
        self.build_lib = self.build_temp = None

    def finalize_options(self) -> None:
        names = ("build_lib", "build_temp")
        self.set_undefined_options("build", *((name, name) for name in names))

    def run(self) -> None:
        # Configures again: the last cmake and ninja may have been those of pip's isolated build.
        options = [f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"]
        if not self.editable_mode:
            options.append("-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--strip-all")
        options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        jobs = os.environ.get("JOBS", str(os.cpu_count() or 1))
        cmake("-G", "Ninja", *options, "-S", str(ROOT / "csrc"), "-B", str(self.core))
        cmake("--build", str(self.core), "-j", jobs, "-t", "farandole")
        folder = ROOT / "pyruntime" / "lib" if self.editable_mode else self._lib_folder()
        folder.mkdir(parents=True, exist_ok=True)
        for source in (self.library, HEADER):
            target = folder / source.name
            target.unlink(missing_ok=True)
            if self.editable_mode:
                target.symlink_to(os.path.relpath(source, folder))
            else:
                shutil.copy(source, target)
        parse_header(folder / PARSED)

    @property
    def core(self) -> Path:
        return DEVELOPMENT if self.editable_mode else Path(str(self.build_temp)) / "core"

    @property
    def library(self) -> Path:
        return self.core / "libfarandole.so"

    def _lib_folder(self) -> Path:
        return Path(str(self.build_lib)) / "farandole" / "lib"

    def get_source_files(self) -> list[str]:
        return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file())

    def get_outputs(self) -> list[str]:
        names = (self.library.name, HEADER.name, PARSED)
        return [] if self.editable_mode else [str(self._lib_folder() / name) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Links(_StaticPth):
    """Puts a folder of links on sys.path, with tools/real_paths.py, which resolves the links."""

    def __call__(self, wheel: Any, files: list[str], mapping: Mapping[str, str]) -> None:
        super().__call__(wheel, files, mapping)
        wheel.writestr("farandole_real_paths.pth", "import _farandole_real_paths\n")


class Editable(editable_wheel):
    """An editable install: a folder of links on sys.path, with the layout of the installed package.

    Type checkers and editors can follow links. They can't follow setuptools' usual import finder.
    """

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Links:
        return Links(self.distribution, name, [ROOT / "build" / "mypy"])

    def finalize_options(self) -> None:
        super().finalize_options()
        self.mode, self.package_dir = "compat", {"": "build/mypy"}

    def run(self) -> None:
        subprocess.check_call(["make", "--no-print-directory", "-C", str(ROOT), "build/mypy"])
        super().run()


class PlatformDistribution(Distribution):
    """Marks wheels as platform specific, although no extension module is compiled."""

    def has_ext_modules(self) -> bool:
        return True


class BdistWheel(bdist_wheel):
    """Builds one wheel for all versions of Python, because cffi opens the library at run time."""

    def get_tag(self) -> tuple[str, str, str]:
        # An editable install calls this before the build, and ignores the tag.
        library = self.get_finalized_command("build_core").library
        needed = needed_glibc(library) if library.exists() else OLDEST_GLIBC
        major, minor = max(OLDEST_GLIBC, needed)
        machine = sysconfig.get_platform().removeprefix("linux-")
        return "py3", "none", f"manylinux_{major}_{minor}_{machine}"


def cmake(*arguments: str) -> None:
    subprocess.check_call(["cmake", *arguments])


def parse_header(target: Path) -> None:
    """Writes the header in cffi's parsed form. Loading this is faster than parsing the header."""
    ffi = cffi.FFI()
    ffi.set_source(target.stem, None)
    ffi.cdef(HEADER.read_text())
    ffi.emit_python_code(str(target))
    with target.open("a") as file:
        file.write(f"header = {zlib.crc32(HEADER.read_bytes())}\n")


def needed_glibc(library: Path) -> tuple[int, int]:
    """The newest version of glibc that the symbols of a library need. Works for any machine."""
    table = subprocess.check_output(["readelf", "-VW", str(library)], text=True)
    versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", table)
    return max((int(major), int(minor)) for major, minor in versions)


setup(
    cmdclass={
        "build": Build,
        "build_core": BuildCore,
        "bdist_wheel": BdistWheel,
        "editable_wheel": Editable,
        "egg_info": EggInfo,
    },
    distclass=PlatformDistribution,
)
