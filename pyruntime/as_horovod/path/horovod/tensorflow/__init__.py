# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow: everything that farandole.tensorflow exports."""

from farandole.tensorflow import *  # noqa: F403
from farandole.tensorflow import __all__ as __all__
from horovod.tensorflow import elastic as elastic  # type: ignore[no-redef]
