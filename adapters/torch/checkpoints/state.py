# SPDX-License-Identifier: Apache-2.0
"""States as JSON and named tensors, so that reading them runs no code; and the states of the random
generators. For checkpoints, on the thread that saves or loads."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole.torch.kind import check

Tensors = dict[str, Tensor]  # on the CPU and contiguous
Tree = Any  # what JSON holds; _KIND marks what it has no form for

_KIND = "$"
_PLAIN = (bool, int, float, str, type(None))
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}


def encode(value: Any, path: str, tensors: Tensors) -> Tree:
    """The value as a tree; its tensors and arrays are added to `tensors`, by names like `path`.

    Takes dicts, lists and tuples, nested at will, of numbers, texts, None, tensors and NumPy's
    arrays. Raises TypeError, with the path, for all else.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {_KIND: "tensor", "name": _put(tensors, path, value)}
    if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).dtype.kind not in "OV":
        array = np.array(value, order="C")
        name = _put(tensors, path, torch.from_numpy(array.reshape(-1).view(np.uint8)))
        what = "array" if isinstance(value, np.ndarray) else "number"
        return {_KIND: what, "dtype": array.dtype.str, "shape": array.shape, "name": name}
    if kind in (list, tuple):
        members = [encode(x, f"{path}.{i}", tensors) for i, x in enumerate(value)]
        return members if kind is list else {_KIND: "tuple", "members": members}
    if kind is dict and _KIND not in value and all(type(key) is str for key in value):
        return {key: encode(x, f"{path}.{key}", tensors) for key, x in value.items()}
    if kind in _DICTS.values():
        pairs = [
            [encode(key, f"{path}.key", tensors), encode(x, f"{path}.{key}", tensors)]
            for key, x in value.items()
        ]
        tree = {_KIND: kind.__name__, "pairs": pairs}
        if hasattr(value, "_metadata"):  # of a model's state: the versions of its modules
            tree["metadata"] = encode(value._metadata, f"{path}.metadata", tensors)
        return tree
    raise TypeError(
        f"state, {path}, is of type {kind.__name__}, which a checkpoint does not hold: it holds "
        "objects with state_dict() and load_state_dict(), tensors, NumPy's arrays, numbers, texts, "
        "None, and dicts, lists and tuples of these"
    )


def decode(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The value of a tree. Raises KeyError, TypeError or ValueError for what is none."""
    if isinstance(tree, list):
        return [decode(x, tensors) for x in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_KIND)
    if kind is None:
        return {key: decode(x, tensors) for key, x in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind in ("array", "number"):
        flat = tensors[tree["name"]].numpy().view(np.dtype(tree["dtype"]))
        array = flat.reshape(tree["shape"])
        return array if kind == "array" else array[()]
    if kind == "tuple":
        return tuple(decode(x, tensors) for x in tree["members"])
    pairs = [(decode(key, tensors), decode(x, tensors)) for key, x in tree["pairs"]]
    value = _DICTS[kind](pairs if kind != "Counter" else dict(pairs))
    if "metadata" in tree:
        value._metadata = decode(tree["metadata"], tensors)  # type: ignore[attr-defined]
    return value


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
    if x.numel():  # x.numpy() would forbid storage.resize_() for good
        hasher.update(np.from_dlpack(x.reshape(-1).view(torch.uint8)).data)
    return hasher.hexdigest()


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
