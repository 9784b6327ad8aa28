# SPDX-License-Identifier: Apache-2.0
"""States that commit, restore and sync."""

from farandole.torch.elastic import (
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = ["StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]
