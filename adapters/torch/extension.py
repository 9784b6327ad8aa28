# SPDX-License-Identifier: Apache-2.0
"""What packages built on farandole.torch use in addition to its public names and
farandole.extension. Those in extras/ use nothing else."""

from farandole.errors import of_signal
from farandole.torch.functions import broadcast_tensors, largest_flag
from farandole.torch.grad_mode import without_grad
from farandole.torch.kind import describe, receive

__all__ = ["broadcast_tensors", "describe"]
__all__ += ["largest_flag", "of_signal", "receive"]
__all__ += ["without_grad"]
