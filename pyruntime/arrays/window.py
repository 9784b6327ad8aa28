# SPDX-License-Identifier: Apache-2.0
"""Windows: memory on a GPU that NCCL reduces in place, if it can. For bucket_view.py."""

from __future__ import annotations

from typing import Any

from farandole._library import check, ffi, lib
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.arrays.cuda_array import CudaArray

_UINT8 = DTYPES.index("uint8")


class Window:
    """Bytes, not zeroed, freed with their last part.

    number: its name in requests of this process set. Members open their windows in the same
    order, with the same sizes.
    """

    def __init__(self, process_set: int, device: int, nbytes: int) -> None:
        """Raises LibraryError where memory is short."""
        memory, number = ffi.new("void**"), ffi.new("uint32_t*")
        check(lib.farandole_open_window(device, process_set, nbytes, memory, number))
        self._memory = memory[0]
        self._device = device
        self.number = int(number[0])

    def part(self, start: int, nbytes: int, stream: int) -> CudaArray:
        """Some of its bytes, for use in this CUDA stream."""
        address = int(ffi.cast("uintptr_t", self._memory)) + start
        return CudaArray.over(Buffer(address, _UINT8, (nbytes,), self, self._device, stream))

    def __del__(self, close: Any = lib.farandole_close_window) -> None:
        if hasattr(self, "_memory"):
            close(self._memory)
