# SPDX-License-Identifier: Apache-2.0
"""Equal parameters on all ranks, before training starts."""

from __future__ import annotations

from farandole import ProcessSet, broadcast_async_, global_process_set
from farandole.numpy.arrays import Arrays, items

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    params: Arrays, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites each array with the root's values, in place; any dtypes and shapes.

    `params`: a dict of arrays or a list. Raises TypeError for members that are no arrays,
    ValueError for arrays that cannot be written in place, MismatchError where ranks disagree.
    """
    handles = [
        broadcast_async_(array, root_rank, name=f"parameter.{name}", process_set=process_set)
        for name, array in items(params)
    ]
    for handle in handles:
        handle.wait()
