# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of all ranks in one file, and a loader that goes on from them."""

from farandole.extras.checkpoints.checkpoint import (
    CheckpointWrite,
    load_checkpoint,
    save_checkpoint,
)
from farandole.extras.checkpoints.loader import ResumableLoader

__all__ = ["CheckpointWrite", "ResumableLoader", "load_checkpoint", "save_checkpoint"]
