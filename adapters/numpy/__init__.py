# SPDX-License-Identifier: Apache-2.0
"""farandole for NumPy: the framework-neutral calls, typed for arrays, and helpers for training."""

import farandole as _farandole
from farandole import *  # noqa: F403
from farandole import __all__ as __all__  # mypy reads this list, Python the one below
from farandole import __version__ as __version__
from farandole.parameters import broadcast_parameters

__all__ = [*_farandole.__all__, "broadcast_parameters"]  # noqa: F811


def __dir__() -> list[str]:
    return sorted(__all__)
