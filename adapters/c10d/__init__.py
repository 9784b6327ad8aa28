# SPDX-License-Identifier: Apache-2.0
"""The backend `farandole` of torch.distributed: `init_process_group("farandole")`.

`import farandole.torch`, or the first use of the backend, calls register(). From torch 2.5 on,
`import torch` alone registers the backend's name (farandole_autoload).
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
    """Registers the backend. Does nothing if torch was built without torch.distributed.

    Also sets RANK and similar variables from the launcher's variables. If the ranks have not met
    when the first optimizer step ends, the process warns.
    """
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
    """torch calls this after every step of every optimizer. Only the first call has an effect."""
    if unmet.is_open():
        unmet.mark_met() if dist.is_initialized() else unmet.warn_if_unmet()
