# SPDX-License-Identifier: Apache-2.0
"""The backend `farandole` of torch.distributed: `init_process_group("farandole")`.

Importing farandole.torch registers it, and completes what a launcher tells: scripts that look for
RANK find it, and ranks that train without having met each other say so. This module is all that
such an import costs.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole.start import ancestry, launchers, unmet

__all__ = ["register"]

_NAME = "farandole"


def register() -> None:
    """Makes torch.distributed know the backend; does nothing where torch was built without it."""
    if not dist.is_available() or hasattr(dist.Backend, _NAME.upper()):
        return
    from farandole.torch.distributed import meeting

    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 attaches a recorder of calls to groups of all backends but these, which fails for a
    # group in Python. farandole has a flight recorder of its own.
    recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(_NAME)
    meeting.install()
    if not unmet.is_child():
        launchers.complete()
        ancestry.renew()
    if unmet.is_open():
        register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    if unmet.is_open() and dist.is_initialized():
        unmet.settle()
    unmet.tell_training()


def _create(options: Any, _: Any) -> Any:
    from farandole.torch.distributed.world import create

    return create(options)
