# SPDX-License-Identifier: Apache-2.0
"""The backend `farandole` of torch.distributed: `init_process_group("farandole")`.

Importing farandole.torch registers it, and completes what a launcher tells: scripts that look for
RANK find it, and ranks that train without having met each other say so. `import torch` alone does
so too, from 2.5 on (farandole_autoload). This module is all that such an import costs.
"""

from __future__ import annotations

from farandole.installed import needs

with needs("torch", "farandole.c10d", "PyTorch", "pip install torch"):
    import torch.distributed as dist

import farandole_autoload
from farandole.start import ancestry, launchers, unmet

__all__ = ["register"]


def register() -> None:
    """Makes torch.distributed know the backend; does nothing where torch was built without it."""
    if not dist.is_available():
        return
    farandole_autoload.register()
    if not unmet.is_child():
        launchers.complete()
        ancestry.renew()
    if unmet.is_open():
        farandole_autoload.watch()
