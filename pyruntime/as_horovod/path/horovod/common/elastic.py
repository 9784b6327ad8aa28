# SPDX-License-Identifier: Apache-2.0
"""States that commit, restore and sync, for any framework."""

from farandole.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
