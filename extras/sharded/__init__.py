# SPDX-License-Identifier: Apache-2.0
"""Optimizers that divide their state over the ranks, and how gradients reach them."""

from farandole.extras.sharded.layout import merge_sharded_state_dicts
from farandole.extras.sharded.optimizer import Division

__all__ = ["Division", "merge_sharded_state_dicts"]
