# SPDX-License-Identifier: Apache-2.0
"""The GPU checks of `farandole doctor`: the GPUs, and the libraries as the core finds them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farandole.installed import cards, mapped, number_of, open_library, version
from farandole.tools.finding import Finding, error, ok, warning

_OLDEST_NCCL = 21400  # csrc/lib/gpu/nccl.h
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute


def _driver() -> Iterator[Finding]:
    """The driver and the GPUs; libraries are checked only if there is a GPU."""
    cuda, path = open_library("FARANDOLE_CUDA_LIBRARY", ["libcuda.so.1"])
    nodes = sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))
    if cuda is None:
        if nodes:
            remedy = "install the NVIDIA driver; in a container, --gpus all"
            yield error("CUDA", f"{', '.join(nodes)} without libcuda.so.1", remedy)
        else:
            yield ok("CUDA", "no driver and no GPU here")
        return
    count = cards()
    if count == 0:
        text = f"{path} shows no GPU (cuInit gives {cuda.cuInit(0)})"
        remedy = "in a container, --gpus all; or CUDA_VISIBLE_DEVICES hides them"
        yield warning("CUDA", text, remedy)
        return
    newest = number_of(cuda.cuDriverGetVersion)
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
        text = "not found: our GPU kernel cannot be compiled"
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
        text = "not found: tensors on GPUs travel through host memory"
        yield warning("NCCL", text, remedy)
        return
    number = number_of(nccl.ncclGetVersion)
    text = f"{number // 10000}.{number % 10000 // 100}.{number % 100} ({path})"
    if number < _OLDEST_NCCL:
        yield warning("NCCL", f"{text} is too old: host memory is used instead", remedy)
    elif len(mapped("libnccl")) > 1:
        advice = "uninstall one, or name one in FARANDOLE_NCCL_LIBRARY"
        yield warning("NCCL", f"two in one process: {text}", advice)
    else:
        yield ok("NCCL", text)


def _frameworks() -> Iterator[Finding]:
    """The installed libraries with arrays on GPUs."""
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        if found := version(package):
            yield ok("CuPy", f"{found} ({package})")
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        remedy = "pip install torch from an index with CUDA builds (pytorch.org says which)"
        yield warning("torch on GPUs", f"torch {torch.__version__} is a CPU build", remedy)


CHECKS: list[Callable[[], Iterator[Finding]]] = [_driver]
