# SPDX-License-Identifier: Apache-2.0
"""farandole for CuPy: the framework-neutral calls on GPU arrays, and helpers for training.

Calls are ordered with CuPy's current stream. Inputs may therefore still be computed in that stream,
and you may use results in that stream at once. The host does not wait. Choose the device before the
first call: `cupy.cuda.Device(farandole.cupy.local_rank()).use()`.
"""

from farandole.installed import needs as _needs

with _needs("cupy", "farandole.cupy", "CuPy", "pip install cupy-cuda13x` or `cupy-cuda12x"):
    import cupy as _cupy  # noqa: F401

import farandole as _farandole
from farandole import *  # noqa: F403
from farandole import __all__ as __all__  # mypy reads this list, Python the one below
from farandole import __version__ as __version__
from farandole.cupy.kind import CupyKind as CupyKind
from farandole.parameters import broadcast_parameters

__all__ = [*_farandole.__all__, "broadcast_parameters"]  # noqa: F811


def __dir__() -> list[str]:
    return sorted(__all__)
