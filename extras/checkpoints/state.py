# SPDX-License-Identifier: Apache-2.0
"""States as JSON and named tensors, so that reading them runs no code; and the states of the random
generators. For checkpoints, on the thread that saves or loads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole.extension import trees
from farandole.torch.extension import held

Tree = trees.Tree
Tensors = dict[str, Tensor]  # on the CPU and contiguous


class _TensorElements(trees.Elements):
    """Elements among the tensors of a checkpoint."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def put(self, path: str, flat: trees.Flat) -> str:
        """Keeps bytes as a tensor, under a name like `path`; returns the name."""
        return _put(self._tensors, path, torch.from_numpy(flat))

    def take(self, name: str) -> trees.Flat:
        """The bytes of the tensor of this name. Raises KeyError."""
        return self._tensors[name].numpy()

    def encode(self, path: str, value: Any) -> Tree | None:
        """The tree of a tensor; None for all else."""
        if not isinstance(value, Tensor):
            return None
        return {trees.KIND: "tensor", "name": _put(self._tensors, path, value)}

    def decode(self, tree: dict[str, Any]) -> Tensor:
        """The tensor of such a tree."""
        if tree[trees.KIND] != "tensor":
            raise ValueError(f"unknown kind {tree[trees.KIND]!r}")
        return self._tensors[tree["name"]]


def encode(value: Any, path: str, tensors: Tensors) -> Tree:
    """The value as a tree; its tensors and arrays are added to `tensors`, by names like `path`.

    Takes what trees.encode() does, and tensors. Raises TypeError, with the path, for all else.
    """
    return trees.encode(value, path, _TensorElements(tensors))


def decode(tree: Tree, tensors: Tensors) -> Any:
    """The value of a tree. Raises KeyError, TypeError or ValueError for what is none."""
    return trees.decode(tree, _TensorElements(tensors))


def _put(tensors: Tensors, path: str, x: Tensor) -> str:
    """Adds a tensor, under a name that is still free; returns the name."""
    x = held(x, path)
    while path in tensors:
        path += "'"
    tensors[path] = x
    return path


def random_state() -> dict[str, Any]:
    """The states of the process's generators: Python's, NumPy's, torch's of CPU and present GPU."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets them to a random_state(); that of a GPU where there is one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
