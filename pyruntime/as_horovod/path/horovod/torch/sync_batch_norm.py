# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm of horovod.torch."""

from farandole.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
