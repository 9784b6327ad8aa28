# SPDX-License-Identifier: Apache-2.0
"""farandole for TensorFlow. Horovod's scripts run with `import farandole.tensorflow as hvd`:

hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)

docs/tensorflow.md tells the rules of calls inside tf.function.
"""

from farandole.installed import needs as _needs

with _needs("tensorflow", "farandole.tensorflow", "TensorFlow", "pip install tensorflow"):
    import tensorflow as _tensorflow  # noqa: F401

from farandole import *  # noqa: F403
from farandole import __all__ as _neutral
from farandole import __version__ as __version__
from farandole.errors import FarandoleError as HorovodInternalError
from farandole.keras.optimizer import DistributedOptimizer
from farandole.tensorflow import elastic
from farandole.tensorflow.collectives import *  # type: ignore[assignment] # noqa: F403
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.exchange import *  # type: ignore[assignment,no-redef] # noqa: F403
from farandole.tensorflow.gradients import DistributedGradientTape
from farandole.tensorflow.graph import typed_errors
from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    *_neutral,
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNormalization",
    "broadcast_variables",  # noqa: F405
    "elastic",
    "typed_errors",
]


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
