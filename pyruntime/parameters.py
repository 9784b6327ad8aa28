# SPDX-License-Identifier: Apache-2.0
"""Models as collections of arrays: equal before training, their gradients averaged in each step.

A collection is an array, or a dict or list of collections; adapters say whose arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from farandole.ops import broadcast_async_, grouped_allreduce_
from farandole.process_sets import ProcessSet, global_process_set

__all__ = ["average_gradients", "broadcast_parameters", "items"]


def items(arrays: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, array) in an order that is the same on all ranks: dicts by key, lists by position.

    The name is the way to it, "encoder.weights.0".
    """
    if not isinstance(arrays, (Mapping, list, tuple)):
        yield name, arrays
        return
    members = sorted(arrays.items()) if isinstance(arrays, Mapping) else enumerate(arrays)
    for key, value in members:
        yield from items(value, f"{name}.{key}" if name else str(key))


def average_gradients(
    grads: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Replaces each gradient by its mean over the ranks, in place and all together.

    `grads`: a dict or list, nested at will, of float arrays, the same names and shapes on all
    ranks. Raises as farandole.grouped_allreduce_ does.
    """
    arrays = [array for _, array in items(grads)]
    grouped_allreduce_(arrays, name=name, process_set=process_set)


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites each array with the root's values, in place; any dtypes and shapes.

    `params`: a dict or list of arrays, nested at will. Raises TypeError for members that are no
    arrays, ValueError for arrays that cannot be written in place, MismatchError where ranks
    disagree.
    """
    handles = [
        broadcast_async_(array, root_rank, name=f"parameter.{name}", process_set=process_set)
        for name, array in items(params)
    ]
    for handle in handles:
        handle.wait()
