# SPDX-License-Identifier: Apache-2.0
"""The collectives of horovod.torch."""

from farandole.torch.mpi_ops import *  # noqa: F403
from farandole.torch.mpi_ops import __all__ as __all__
