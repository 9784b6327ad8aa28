# SPDX-License-Identifier: Apache-2.0
"""The backend `farandole` of torch.distributed: `init_process_group("farandole")`.

Importing farandole.torch, or asking for the backend, registers it, and completes what a launcher
tells: scripts that look for RANK then find it, and ranks that train without having met each other
say so. `import torch` alone registers the backend's name (farandole_autoload), from 2.5 on.
"""

from __future__ import annotations

from typing import Any

from farandole.installed import needs

with needs("torch", "farandole.c10d", "PyTorch", "pip install torch"):
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

import farandole_autoload
from farandole.start import ancestry, launchers, unmet

__all__ = ["register"]

_watches = False


def register() -> None:
    """Makes torch.distributed know the backend; does nothing where torch was built without it."""
    global _watches
    if not dist.is_available():
        return
    farandole_autoload.register()
    if not unmet.is_child():
        launchers.complete()
        ancestry.renew()
    if unmet.is_open() and not _watches:
        register_optimizer_step_post_hook(_stepped)
        _watches = True


def _stepped(*_: Any) -> None:
    """Called after every step of every optimizer; the first one tells."""
    if unmet.is_open():
        unmet.mark_met() if dist.is_initialized() else unmet.warn_if_unmet()
