# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow.keras.elastic: that of horovod.keras."""

from horovod.keras.elastic import *  # noqa: F403
from horovod.keras.elastic import __all__ as __all__
