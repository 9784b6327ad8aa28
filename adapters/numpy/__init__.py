# SPDX-License-Identifier: Apache-2.0
"""farandole for NumPy programs: the neutral calls, typed for arrays, and helpers for training."""

from farandole import *  # noqa: F403
from farandole import __all__ as _neutral
from farandole import __version__ as __version__
from farandole.parameters import average_gradients, broadcast_parameters

__all__ = [*_neutral, "average_gradients", "broadcast_parameters"]


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
