# SPDX-License-Identifier: Apache-2.0
"""Adasum's arithmetic on a GPU, by the core's kernels: dot products and scaled copies. For
adasum.py, on its thread."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from farandole._library import check, ffi, lib
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.arrays.cuda_array import CudaArray

_FLOAT32 = DTYPES.index("float32")
_SMALL = ("float16", "bfloat16")  # added in float32
_Float64 = np.ndarray[Any, np.dtype[np.float64]]


def gram(stripes: CudaArray, members: int) -> _Float64:
    """(members, members) dot products of the rows of (members * n,), in float64; it waits."""
    dots = np.zeros((members, members))
    elements = stripes.shape[0] // members
    if elements > 0:
        rows, dtype = stripes.address, DTYPES.index(stripes.dtype)
        out = ffi.from_buffer("double[]", dots, require_writable=True)
        check(
            lib.farandole_gpu_dots(
                stripes.device, dtype, rows, members, elements, stripes.stream, out
            )
        )
    return dots


def scaled(source: Buffer, factor: float, target: Buffer) -> CudaArray:
    """The flat source times a factor, in the target's memory; 16-bit floats as new float32."""
    wide = CudaArray.over(target)
    if DTYPES[source.dtype] in _SMALL:
        count = prod(source.shape)
        wide = CudaArray.empty(_FLOAT32, (count,), target.device, target.stream)
    _scale(wide, CudaArray.over(source), factor)
    return wide


def store(wide: CudaArray, target: Buffer) -> None:
    """Writes what scaled() gave to the target, rounded to nearest even."""
    if wide.dtype != DTYPES[target.dtype]:
        _scale(CudaArray.over(target), wide, 1.0)


def _scale(target: CudaArray, source: CudaArray, factor: float) -> None:
    count = source.shape[0]
    if count > 0:
        to, of = (DTYPES.index(x.dtype) for x in (target, source))
        addresses = (to, target.address, of, source.address)
        check(lib.farandole_gpu_scale(target.device, *addresses, count, factor, source.stream))
