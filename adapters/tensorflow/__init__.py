# SPDX-License-Identifier: Apache-2.0
"""farandole for TensorFlow. Horovod scripts run with `import farandole.tensorflow as hvd`:

hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)

docs/tensorflow.md has the rules for calls inside tf.function.
"""

from farandole.installed import needs as _needs

with _needs("tensorflow", "farandole.tensorflow", "TensorFlow", "pip install tensorflow"):
    import tensorflow as _tensorflow  # noqa: F401

from farandole import shared as _shared
from farandole.arrays.arena import empty
from farandole.errors import FarandoleError as HorovodInternalError
from farandole.keras.optimizer import DistributedOptimizer
from farandole.ops import alltoall_async
from farandole.shared import *  # noqa: F403
from farandole.shared import __all__ as __all__  # mypy reads this list, Python the one below
from farandole.tensorflow import elastic
from farandole.tensorflow.collectives import *  # noqa: F403
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.exchange import *  # noqa: F403
from farandole.tensorflow.gradients import DistributedGradientTape
from farandole.tensorflow.graph import typed_errors
from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [  # noqa: F811
    *_shared.__all__,
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNormalization",
    "allgather",  # noqa: F405
    "allreduce",  # noqa: F405
    "alltoall",  # noqa: F405
    "alltoall_async",
    "barrier",  # noqa: F405
    "broadcast",  # noqa: F405
    "broadcast_variables",  # noqa: F405
    "elastic",
    "empty",
    "grouped_allgather",  # noqa: F405
    "grouped_allreduce",  # noqa: F405
    "grouped_reducescatter",  # noqa: F405
    "reducescatter",  # noqa: F405
    "typed_errors",
]


def __dir__() -> list[str]:
    return sorted(__all__)
