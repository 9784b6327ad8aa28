# SPDX-License-Identifier: Apache-2.0
"""Values as JSON and named arrays, so that reading them runs no code. For checkpoints and the
commits of elastic training, on the thread that writes or reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from typing import Any

import numpy as np

Tree = Any  # what JSON holds; KIND marks what it has no form for
Flat = np.ndarray[Any, np.dtype[np.uint8]]  # of one dimension

KIND = "$"
_PLAIN = (bool, int, float, str, type(None))
_GROUPS: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
# Types of ml_dtypes, which NumPy knows by their names only.
_NAMED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class Elements(ABC):
    """Keeps the elements of arrays while a tree stands for their owner."""

    keeps_classes = False  # whether decode() is given the value whose place a tree takes
    holds = "tensors, NumPy's arrays"  # beside what all hold, for errors

    @abstractmethod
    def put(self, path: str, flat: Flat) -> str:
        """Keeps bytes, under a name like `path`; returns the name."""

    @abstractmethod
    def take(self, name: str) -> Flat:
        """The bytes of a name. Raises KeyError."""

    @abstractmethod
    def encode(self, path: str, value: Any) -> Tree | None:
        """The tree of a framework's array; None for all else. Raises TypeError, ValueError."""

    @abstractmethod
    def decode(self, tree: dict[str, Any]) -> Any:
        """The framework's array of such a tree."""


def encode(value: Any, path: str, elements: Elements) -> Tree:
    """The value as a tree; its arrays go to `elements`, by names like `path`.

    Raises TypeError, with the path, for what no tree stands for.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if (tree := elements.encode(path, value)) is not None:
        return tree
    if isinstance(value, (np.ndarray, np.generic)) and _name_of(value.dtype):
        return _array(value, path, elements)
    if kind is bytes or kind is bytearray:
        flat = np.array(bytearray(value), np.uint8)
        return {KIND: kind.__name__, "name": elements.put(path, flat)}
    if kind is complex:
        return {KIND: "complex", "parts": [value.real, value.imag]}
    if kind is list or kind in _GROUPS.values():
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value  # as on all ranks
        members = [encode(x, f"{path}.{i}", elements) for i, x in enumerate(ordered)]
        return members if kind is list else {KIND: kind.__name__, "members": members}
    if elements.keeps_classes and _is_named_tuple(kind):
        fields = zip(kind._fields, value, strict=True)
        members = [encode(x, f"{path}.{name}", elements) for name, x in fields]
        return {KIND: "named", "class": kind.__name__, "members": members}
    if kind is dict and KIND not in value and all(type(key) is str for key in value):
        return {key: encode(x, f"{path}.{key}", elements) for key, x in value.items()}
    if kind in _DICTS.values():
        pairs = [
            [encode(key, f"{path}.key", elements), encode(x, f"{path}.{key}", elements)]
            for key, x in value.items()
        ]
        tree = {KIND: kind.__name__, "pairs": pairs}
        if hasattr(value, "_metadata"):  # of a model's state: the versions of its modules
            tree["metadata"] = encode(value._metadata, f"{path}.metadata", elements)
        return tree
    raise TypeError(
        f"state, {path}, is of type {kind.__name__}, which a file without code can't hold; it can "
        f"hold objects with state_dict() and load_state_dict(), {elements.holds}, numbers, texts, "
        "bytes, None, and dicts, lists, tuples and sets of these"
    )


def decode(tree: Tree, elements: Elements, like: Any = None) -> Any:
    """The value of a tree; `like`: the value whose place it takes, with its classes.

    Raises one of Python's own errors if `tree` is not a tree.
    """
    if isinstance(tree, list):
        return [decode(x, elements, _member(like, i)) for i, x in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(KIND)
    if kind is None:
        return {key: decode(x, elements, _entry(like, key)) for key, x in tree.items()}
    if kind in ("array", "number"):
        flat = elements.take(tree["name"]).view(_dtype(tree["dtype"]))
        array = flat.reshape(tree["shape"])
        return array if kind == "array" else array[()]
    if kind in ("bytes", "bytearray"):
        data = elements.take(tree["name"]).tobytes()
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(*tree["parts"])
    if kind in _GROUPS:
        return _GROUPS[kind](
            decode(x, elements, _member(like, i)) for i, x in enumerate(tree["members"])
        )
    if kind == "named":
        return _named(tree, elements, like)
    if kind in _DICTS:
        return _dict(tree, elements, like)
    return elements.decode(tree)


def _dict(tree: dict[str, Any], elements: Elements, like: Any) -> Any:
    keys = [decode(key, elements) for key, _ in tree["pairs"]]
    pairs = [
        (key, decode(x, elements, _entry(like, key)))
        for key, (_, x) in zip(keys, tree["pairs"], strict=True)
    ]
    kind = tree[KIND]
    value = _DICTS[kind](pairs if kind != "Counter" else dict(pairs))
    if "metadata" in tree:
        value._metadata = decode(tree["metadata"], elements)  # type: ignore[attr-defined]
    return value


def _named(tree: dict[str, Any], elements: Elements, like: Any) -> Any:
    """A named tuple, of the class that the value before it has."""
    members = tree["members"]
    kind = type(like)
    fits = kind.__name__ == tree["class"] and _is_named_tuple(kind)
    if not fits or len(kind._fields) != len(members):
        raise TypeError(
            f"the file has a {tree['class']}, a named tuple, and the program a "
            f"{kind.__name__}: start with a value of the same class"
        )
    return kind(*(decode(x, elements, like[i]) for i, x in enumerate(members)))


def _array(value: Any, path: str, elements: Elements) -> Tree:
    array = np.array(value, order="C")
    name = elements.put(path, array.reshape(-1).view(np.uint8))
    what = "array" if isinstance(value, np.ndarray) else "number"
    shape = [int(n) for n in array.shape]
    return {KIND: what, "dtype": _name_of(array.dtype), "shape": shape, "name": name}


def _name_of(dtype: np.dtype[Any]) -> str:
    """What _dtype() knows it by; empty for a type whose elements are no plain numbers or texts."""
    if dtype.name in _NAMED:
        return str(dtype.name)
    return "" if dtype.kind in "OV" else dtype.str


def _dtype(name: str) -> np.dtype[Any]:
    if name in _NAMED:
        import ml_dtypes  # what has made such arrays needs it too

        name = getattr(ml_dtypes, name)
    dtype: np.dtype[Any] = np.dtype(name)
    if not _name_of(dtype):
        raise TypeError(f"an array of type {name} can't be read from a file")
    return dtype


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _member(like: Any, i: int) -> Any:
    return like[i] if isinstance(like, (list, tuple)) and i < len(like) else None


def _entry(like: Any, key: Any) -> Any:
    return like.get(key) if isinstance(like, dict) else None
