# SPDX-License-Identifier: Apache-2.0
"""farandole for CuPy programs: the neutral calls on arrays on GPUs, and helpers for training.

Arrays in, arrays out, in order with CuPy's current stream: what a call reads may still be under
way in it, what it gives may be used in it at once, and the host waits for neither. Choose the
device, `cupy.cuda.Device(farandole.cupy.local_rank()).use()`, before the first call.
"""

from farandole import *  # noqa: F403
from farandole import __all__ as _neutral
from farandole import __version__ as __version__
from farandole.cupy.kind import CupyKind as CupyKind
from farandole.parameters import average_gradients, broadcast_parameters

__all__ = [*_neutral, "average_gradients", "broadcast_parameters"]
