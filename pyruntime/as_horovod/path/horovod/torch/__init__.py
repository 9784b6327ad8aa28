# SPDX-License-Identifier: Apache-2.0
"""horovod.torch: everything that farandole.torch exports."""

from farandole.torch import *  # noqa: F403
from farandole.torch import __all__ as _names
from horovod.torch import elastic  # type: ignore[no-redef]

__all__ = [*_names, "elastic"]
