# SPDX-License-Identifier: Apache-2.0
"""farandole for PyTorch. Horovod's scripts run with `import farandole.torch as hvd`:

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from farandole.installed import needs as _needs

with _needs("torch", "farandole.torch", "PyTorch", "pip install torch"):
    import torch as _torch  # noqa: F401

from farandole.c10d import register as _register
from farandole.extras import adasum as _  # noqa: F401  # registers its optimizer
from farandole.extras.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from farandole.torch import elastic
from farandole.torch import mpi_ops as _mpi_ops
from farandole.torch.compression import Compression
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.mpi_ops import *  # noqa: F403
from farandole.torch.mpi_ops import __all__ as __all__  # mypy reads this list, Python the one below
from farandole.torch.optimizer import DistributedOptimizer, ReducingOptimizer

__all__ = [  # noqa: F811
    *_mpi_ops.__all__,
    "Compression",
    "DistributedOptimizer",
    "ReducingOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "elastic",
]

_register()


def __dir__() -> list[str]:
    return sorted(__all__)
