# SPDX-License-Identifier: Apache-2.0
"""What packages that stand on farandole.torch use beside its public names and farandole.extension:
checks of tensors, and tensors as bytes. Those in extras/ use nothing else."""

from farandole.torch.blocks import digest_of, held
from farandole.torch.functions import broadcast_tensors
from farandole.torch.grad_mode import without_grad
from farandole.torch.kind import describe

__all__ = ["broadcast_tensors", "describe", "digest_of", "held", "without_grad"]
