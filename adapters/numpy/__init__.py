# SPDX-License-Identifier: Apache-2.0
"""farandole for NumPy programs: the neutral calls, typed for arrays, and helpers for training."""

from farandole import *  # noqa: F403
from farandole import __all__ as _neutral
from farandole import __version__ as __version__
from farandole.numpy.gradients import average_gradients
from farandole.numpy.parameters import broadcast_parameters

__all__ = [*_neutral, "average_gradients", "broadcast_parameters"]
