# SPDX-License-Identifier: Apache-2.0
"""States as JSON and named tensors, so that reading them runs no code; and the states of the random
generators. For checkpoints, on the thread that saves or loads."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole import trees
from farandole.torch.kind import check
from farandole.trees import Tree

Tensors = dict[str, Tensor]  # on the CPU and contiguous


class _TensorElements(trees.Elements):
    """Elements among the tensors of a checkpoint."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def put(self, path: str, flat: trees.Flat) -> str:
        """As in Elements."""
        return _put(self._tensors, path, torch.from_numpy(flat))

    def take(self, name: str) -> trees.Flat:
        """As in Elements."""
        return self._tensors[name].numpy()

    def encode(self, path: str, value: Any) -> Tree | None:
        """As in Elements."""
        if not isinstance(value, Tensor):
            return None
        return {trees.KIND: "tensor", "name": _put(self._tensors, path, value)}

    def decode(self, tree: dict[str, Any]) -> Tensor:
        """As in Elements."""
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


def as_block(x: Tensor, path: str) -> tuple[str, tuple[int, ...], trees.Flat]:
    """The dtype's name, the shape and the bytes of a tensor, for farandole.commits.

    Raises TypeError or ValueError, with the path, for one that no file holds.
    """
    held: Tensors = {}
    x = held[_put(held, path, x)]
    return str(x.dtype).removeprefix("torch."), tuple(x.shape), _flat(x)


def of_block(dtype: str, shape: tuple[int, ...], flat: trees.Flat) -> Tensor:
    """The inverse of as_block(), over the same memory; on the CPU."""
    known: torch.dtype = getattr(torch, dtype)
    if not flat.size:
        return torch.empty(shape, dtype=known)
    return torch.from_numpy(flat).view(known).reshape(shape)


def _put(tensors: Tensors, path: str, x: Tensor) -> str:
    """Adds a tensor, under a name that is still free; returns the name."""
    try:
        check(x)
        if x.dtype is torch.complex128:
            raise TypeError("safetensors knows no complex128: save torch.view_as_real(x)")
    except (TypeError, ValueError) as reason:
        raise type(reason)(f"state, {path}: {reason}") from reason
    while path in tensors:
        path += "'"
    tensors[path] = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return path


def digest(x: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and elements."""
    hasher = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    hasher.update(_flat(x).data)
    return hasher.hexdigest()


def _flat(x: Tensor) -> trees.Flat:
    """The elements of a contiguous tensor on the CPU."""
    if not x.numel():
        return np.empty(0, np.uint8)
    # x.numpy() would forbid storage.resize_() for good
    return np.from_dlpack(x.reshape(-1).view(torch.uint8)).view(np.uint8)


def random_state() -> dict[str, Any]:
    """The states of the process's generators: Python's, NumPy's, torch's of CPU and present GPU."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets them to a random_state(); that of a GPU where there is one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
