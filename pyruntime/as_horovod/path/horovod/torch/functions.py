# SPDX-License-Identifier: Apache-2.0
"""Parameters, optimizer state and objects across ranks."""

from farandole.objects import allgather_object, broadcast_object
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
