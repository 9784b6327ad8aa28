# SPDX-License-Identifier: Apache-2.0
"""farandole for Keras 3, on any backend. Horovod scripts run with `import farandole.keras as hvd`:

hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=loss)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from typing import Any as _Any

from farandole.installed import needs as _needs

with _needs("keras", "farandole.keras", "Keras 3", "pip install keras"):
    import keras as _keras  # noqa: F401

import farandole as _farandole
from farandole import *  # noqa: F403
from farandole import __all__ as __all__  # mypy reads this list, Python the one below
from farandole import __version__ as __version__
from farandole.keras import callbacks, elastic
from farandole.keras.callbacks import broadcast_state
from farandole.keras.optimizer import DistributedOptimizer, load_model
from farandole.keras.optimizer import calls as _calls

__all__ = [  # noqa: F811
    *_farandole.__all__,
    "Compression",  # noqa: F405
    "DistributedOptimizer",
    "broadcast_state",
    "callbacks",
    "elastic",
    "load_model",
]


def __getattr__(name: str) -> _Any:
    """Imports Compression on first use, because it belongs to the package for Keras's backend."""
    if name == "Compression":
        return _calls().Compression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
