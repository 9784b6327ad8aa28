# SPDX-License-Identifier: Apache-2.0
"""The checks of `farandole doctor` for one host and its software, one function per subject."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from farandole._library import lib
from farandole._library import text as c_text
from farandole.errors import error_text
from farandole.installed import gpu_count, int_from, mapped_files, open_library
from farandole.installed import version as _version
from farandole.start import system_calls
from farandole.start.launchers import launcher

_MB = 1 << 20
_STAGING = 64 * _MB  # bytes per rank, enough for staging, control and a small model's arena
# Number of file descriptors. Two per peer on the host are needed, and those of Python and MPI.
_FEW_FILES = 256
_OLDEST_NCCL = 21400  # see csrc/lib/gpu/nccl.h
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # values of CUdevice_attribute


class Level(IntEnum):
    """Severity of a finding."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """One line of the table. `remedy` is "" if the user need not do anything."""

    name: str
    level: Level
    text: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def ok(name: str, text: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """Returns a finding about a problem that makes farandole slower or less robust."""
    return Finding(name, Level.WARNING, text, remedy)


def error(name: str, text: str, remedy: str) -> Finding:
    """Returns a finding about a problem with which farandole does not work."""
    return Finding(name, Level.ERROR, text, remedy)


def read(path: str) -> str:
    """Returns a file's text without surrounding blanks, or "" if the file cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def numbers(version: str) -> tuple[int, ...]:
    """Returns the first three numbers in a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _versions() -> Iterator[Finding]:
    core = f"{c_text(lib.farandole_version())}, build {c_text(lib.farandole_build_id())}"
    yield ok("farandole", core)
    python = f"{platform.python_version()} ({sys.executable})"
    yield ok("python", python)
    kernel = platform.release()
    if numbers(kernel) < (5, 3):
        text = f"Linux {kernel}: no pidfd; deaths are noticed by closed sockets"
        yield warning("kernel", text, "use Linux 5.3 or newer")
    else:
        yield ok("kernel", f"Linux {kernel} {platform.machine()}")


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if not version:
        yield ok("torch", "not installed: farandole.torch is not available")
    elif numbers(version) < (2, 1):
        remedy = "pip install -U torch (2.1 or newer)"
        yield error("torch", f"{version} has no post-accumulate hooks", remedy)
    elif "+rocm" in version:
        remedy = "send CPU copies, or train with DDP over RCCL"
        yield warning("torch", f"{version}: tensors on AMD GPUs cannot be sent", remedy)
    else:
        yield ok("torch", version)
    numpy = _version("numpy")
    if version and numbers(numpy) >= (2,) and numbers(version) < (2, 3):
        text = f"torch {version} was built for NumPy 1, and NumPy {numpy} is installed"
        yield warning("numpy", text, "pip install 'numpy<2', or torch 2.3 or newer")
    else:
        yield ok("numpy", numpy)


def _shared_memory() -> Iterator[Finding]:
    try:
        memory = system_calls.memfd_create("farandole-doctor")
        try:
            os.posix_fallocate(memory, 0, 4 * _MB)
        finally:
            os.close(memory)
        yield ok("shared memory", "memfd works (farandole puts no file into /dev/shm)")
    except OSError as reason:
        remedy = "raise the memory limit; a sandbox must permit memfd_create"
        yield error("shared memory", f"memfd: {reason.strerror}", remedy)
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").exists() else None
    size = shm.f_blocks * shm.f_frsize // _MB if shm else 0
    if size < 64:
        text = f"{size} MB: enough for farandole, but MPI and DataLoader workers use it"
        yield warning("/dev/shm", text, "docker run --shm-size=1g (or --ipc=host)")
    else:
        yield ok("/dev/shm", f"{size} MB")


def _memory() -> Iterator[Finding]:
    limit, used = read("/sys/fs/cgroup/memory.max"), read("/sys/fs/cgroup/memory.current")
    if not limit.isdigit() or not used.isdigit():
        limit = read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
        used = read("/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if not limit.isdigit() or int(limit) > 1 << 50:
        yield ok("cgroup memory", "no limit")
        return
    free = int(limit) - int(used or 0)
    text = f"{free // _MB} MB of {int(limit) // _MB} MB are free"
    if free < _STAGING:
        yield warning("cgroup memory", text, "raise the limit: the OOM killer ends ranks silently")
    else:
        yield ok("cgroup memory", text)


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:
        yield warning("open files", f"at most {files}", f"ulimit -n {min(most, 4096)}")
    else:
        yield ok("open files", f"at most {files}")
    try:
        os.close(system_calls.pidfd_open(os.getpid()))
        yield ok("pidfd", "deaths of other ranks are noticed at once")
    except OSError as reason:
        text = f"not available ({error_text(reason)}): deaths are noticed by closed sockets"
        yield warning("pidfd", text, "permit pidfd_open in the sandbox; farandole works without it")
    signal = lib.farandole_stack_signal()
    if signal > 0:
        yield ok("stack signal", f"{signal}: stall reports show the main thread's stack")
    else:
        text = "none: stall reports show no Python stacks while native code holds the GIL"
        yield warning("stack signal", text, "unset FARANDOLE_STACK_SIGNAL")


def _cores() -> Iterator[Finding]:
    all_cores, mine = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    ranks = launcher().place.get("LOCAL_WORLD_SIZE", 1)
    shared = all_cores if mine == 1 else mine  # ranks that are bound to one core each share all
    if mine == 1 and all_cores // ranks > 1:
        text = f"all threads of this process are bound to one core of {all_cores}"
        yield warning("cores", text, "mpirun --bind-to none (or --bind-to socket)")
    elif ranks > shared:
        text = f"{ranks} ranks share {shared} cores"
        yield warning("cores", text, "start fewer ranks, for speed; results stay correct")
    else:
        yield ok("cores", f"{mine} of {all_cores} usable")
    quota = read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = int(quota[0]) / int(quota[1])
        if cores < ranks:
            text = f"the cgroup grants {cores:.2g} cores to {ranks} ranks"
            yield warning("CPU quota", text, "raise it: ranks freeze while it is used up")
        else:
            yield ok("CPU quota", f"{cores:.2g} cores")


def _gpus() -> Iterator[Finding]:
    """Checks the driver and the GPUs. Checks libraries only if there is a GPU."""
    cuda, path = open_library("FARANDOLE_CUDA_LIBRARY", ["libcuda.so.1"])
    nodes = sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))
    if cuda is None:
        if nodes:
            remedy = "install the NVIDIA driver; in a container, --gpus all"
            yield error("CUDA", f"{', '.join(nodes)} without libcuda.so.1", remedy)
        else:
            yield ok("CUDA", "no driver and no GPU here")
        return
    count = gpu_count()
    if count == 0:
        text = f"{path} shows no GPU (cuInit gives {cuda.cuInit(0)})"
        remedy = "pass --gpus all to the container, or check CUDA_VISIBLE_DEVICES"
        yield warning("CUDA", text, remedy)
        return
    newest = int_from(cuda.cuDriverGetVersion)
    yield ok("CUDA", f"driver for CUDA {newest // 1000}.{newest % 1000 // 10} ({path})")
    yield from (_card(cuda, i) for i in range(count))
    yield from _compiler()
    yield from _nccl()
    yield from _frameworks()


def _card(cuda: Any, ordinal: int) -> Finding:
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(100)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    number = [ctypes.c_int(0), ctypes.c_int(0)]
    for target, attribute in zip(number, (_COMPUTE_MAJOR, _COMPUTE_MINOR), strict=True):
        cuda.cuDeviceGetAttribute(ctypes.byref(target), attribute, device)
    capability = f"compute capability {number[0].value}.{number[1].value}"
    return ok(f"GPU {ordinal}", f"{name.value.decode()}, {capability}")


def _compiler() -> Iterator[Finding]:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"]
    nvrtc, path = open_library("FARANDOLE_NVRTC_LIBRARY", names)
    if nvrtc is None:
        text = "not found: farandole cannot compile its GPU kernel"
        remedy = "pip install nvidia-cuda-nvrtc (CUDA 12: nvidia-cuda-nvrtc-cu12)"
        yield error("NVRTC", text, remedy)
        return
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    yield ok("NVRTC", f"{major.value}.{minor.value} ({path})")


def _nccl() -> Iterator[Finding]:
    nccl, path = open_library("FARANDOLE_NCCL_LIBRARY", ["libnccl.so.2"])
    remedy = "pip install -U nvidia-nccl-cu13 (CUDA 12: nvidia-nccl-cu12)"
    if nccl is None:
        text = "not found: GPU tensors travel through host memory"
        yield warning("NCCL", text, remedy)
        return
    number = int_from(nccl.ncclGetVersion)
    text = f"{number // 10000}.{number % 10000 // 100}.{number % 100} ({path})"
    if number < _OLDEST_NCCL:
        yield warning("NCCL", f"{text} is too old: farandole uses host memory instead", remedy)
    elif len(mapped_files("libnccl")) > 1:
        advice = "uninstall one, or name one in FARANDOLE_NCCL_LIBRARY"
        yield warning("NCCL", f"two in one process: {text}", advice)
    else:
        yield ok("NCCL", text)


def _frameworks() -> Iterator[Finding]:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        if found := _version(package):
            yield ok("CuPy", f"{found} ({package})")
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        remedy = "pip install torch from an index with CUDA builds (pytorch.org says which)"
        yield warning("torch on GPUs", f"torch {torch.__version__} is a CPU build", remedy)


SOFTWARE: list[Check] = [_versions, _torch]
MACHINE: list[Check] = [_gpus, _shared_memory, _memory, _limits, _cores]
