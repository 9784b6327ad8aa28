# SPDX-License-Identifier: Apache-2.0
"""Compression of horovod.torch."""

from farandole.torch.compression import Compression, Compressor

__all__ = ["Compression", "Compressor"]
