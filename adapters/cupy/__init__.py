# SPDX-License-Identifier: Apache-2.0
"""farandole for CuPy programs: the neutral calls on arrays on GPUs, and helpers for training.

Calls take and return arrays in order with CuPy's current stream: inputs may still be computed in
it, results may be used in it at once, and the host waits for neither. Choose the device before the
first call: `cupy.cuda.Device(farandole.cupy.local_rank()).use()`.
"""

from farandole.installed import needs as _needs

with _needs("cupy", "farandole.cupy", "CuPy", "pip install cupy-cuda13x` or `cupy-cuda12x"):
    import cupy as _cupy  # noqa: F401

import farandole as _farandole
from farandole import *  # noqa: F403
from farandole import __all__ as __all__  # for mypy, as the list below is for others
from farandole import __version__ as __version__
from farandole.cupy.kind import CupyKind as CupyKind
from farandole.parameters import broadcast_parameters

__all__ = [*_farandole.__all__, "broadcast_parameters"]  # noqa: F811


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
