# SPDX-License-Identifier: Apache-2.0
"""farandole for PyTorch: `import farandole.torch as hvd`, and Horovod's scripts run.

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _reason:
    if _reason.name != "torch":
        raise
    raise ImportError(
        "farandole.torch needs PyTorch, which is not installed: `pip install torch`"
    ) from _reason

from farandole.errors import (
    FarandoleError,
    LibraryError,
    MismatchError,
    PeerError,
    ShutdownError,
    StallError,
)
from farandole.observe.metrics import log_metrics, metrics
from farandole.torch import elastic
from farandole.torch.compression import Compression
from farandole.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from farandole.torch.learning_rate import check_learning_rate, linear_warmup
from farandole.torch.memory import empty
from farandole.torch.mpi_ops import *  # noqa: F403
from farandole.torch.mpi_ops import __all__ as _calls
from farandole.torch.optimizer import DistributedOptimizer
from farandole.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "FarandoleError",
    "LibraryError",
    "MismatchError",
    "PeerError",
    "ShutdownError",
    "StallError",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_learning_rate",
    "convert_sync_batchnorm",
    "elastic",
    "empty",
    "linear_warmup",
    "log_metrics",
    "metrics",
]
__all__ += _calls
