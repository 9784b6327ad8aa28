# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow.keras.callbacks: those of horovod.keras."""

from horovod.keras.callbacks import *  # noqa: F403
from horovod.keras.callbacks import __all__ as __all__
