# SPDX-License-Identifier: Apache-2.0
"""Averaging gradients: what an optimizer written in plain NumPy calls before its step."""

from __future__ import annotations

from farandole import ProcessSet, global_process_set, grouped_allreduce_
from farandole.numpy.arrays import Arrays, items

__all__ = ["average_gradients"]


def average_gradients(
    grads: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Replaces each gradient by its mean over the ranks, in place and all together.

    `grads`: a dict of float arrays or a list, the same names and shapes on all ranks. Raises as
    farandole.grouped_allreduce_ does.
    """
    arrays = [array for _, array in items(grads)]
    grouped_allreduce_(arrays, name=name, process_set=process_set)
