# SPDX-License-Identifier: Apache-2.0
"""horovod.keras: everything that farandole.keras exports."""

from farandole.keras import *  # noqa: F403
from farandole.keras import __all__ as __all__
from horovod.keras import callbacks as callbacks  # type: ignore[no-redef]
from horovod.keras import elastic as elastic  # type: ignore[no-redef]
