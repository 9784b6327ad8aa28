# SPDX-License-Identifier: Apache-2.0
"""horovod.keras.elastic: a state that commits, restores and syncs, and its callbacks."""

from farandole.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
