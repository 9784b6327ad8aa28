# SPDX-License-Identifier: Apache-2.0
"""farandole for NumPy programs: the neutral calls, typed for arrays, and helpers for training."""

import farandole as _farandole
from farandole import *  # noqa: F403
from farandole import __all__ as __all__  # for mypy, as the list below is for others
from farandole import __version__ as __version__
from farandole.parameters import broadcast_parameters

__all__ = [*_farandole.__all__, "broadcast_parameters"]  # noqa: F811


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
