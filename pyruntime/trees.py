# SPDX-License-Identifier: Apache-2.0
"""Encodes values as JSON and named blocks of bytes. Unlike unpickling, decoding runs no code.
commits.py uses this module on the thread that writes or reads a commit."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from farandole.arrays.kinds import import_adapter

Tree = Any  # a JSON value; a dict that has the key KIND encodes a type that JSON lacks
Flat = np.ndarray[Any, np.dtype[np.uint8]]  # one-dimensional

KIND = "$"
METADATA = "__metadata__"  # reserved by safetensors, so no block may have this name
# Maps a dtype's name in safetensors to (its name in PyTorch and NumPy, its bytes per element).
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
CODES = {name: code for code, (name, _) in DTYPES.items()}
_PLAIN = (bool, int, float, str, type(None))
_GROUPS: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
# The dtypes of ml_dtypes, which NumPy's dtype.str does not name.
_NAMED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# Other libraries' dtypes and StringDType have a dtype.num of at least this.
_FIRST_FOREIGN = 256


class TensorBlock(NamedTuple):
    """A tensor's dtype, shape and bytes, independent of its framework."""

    dtype: str  # name in PyTorch and NumPy
    shape: tuple[int, ...]
    flat: Flat


class Tensors(ABC):
    """Converts a framework's tensors to blocks and back. Its adapter registers an instance.

    The methods are called on the thread that writes or reads a commit.
    """

    @abstractmethod
    def block_of(self, x: Any, path: str) -> tuple[TensorBlock, list[int] | None]:
        """Returns the tensor's block, and its strides if it is not contiguous. Raises TypeError or
        ValueError, whose text names the path, for a tensor that a file cannot hold."""

    @abstractmethod
    def tensor_of(self, block: TensorBlock, strides: list[int] | None) -> Any:
        """Returns a CPU tensor for a block, over the same memory if possible."""


_tensors: list[Tensors] = []  # at most one, which register_torch() sets


def register_torch(tensors: Tensors) -> None:
    """Registers the converter for torch tensors. The torch adapter calls this on import."""
    _tensors[:] = [tensors]


def _of_torch() -> Tensors:
    if not _tensors:
        import_adapter("torch")
    return _tensors[0]


class Blocks:
    """The blocks of one file, by name. Trees refer to blocks by name."""

    def __init__(
        self, objects: Mapping[str, Any], found: dict[str, TensorBlock] | None = None
    ) -> None:
        """`objects` holds, by path, the objects whose states are stored as separate trees."""
        self.found = {} if found is None else found
        self._objects = objects
        self._paths = {id(value): path for path, value in objects.items()}

    def put(self, path: str, flat: Flat) -> str:
        """Adds bytes as a uint8 block. Returns the block's name, which is `path` with quotes
        appended if that name is taken."""
        return self._put(path, TensorBlock("uint8", (flat.size,), flat))

    def take(self, name: str) -> Flat:
        """Returns the bytes of a block. Raises KeyError if there is no such block."""
        return self.found[name].flat

    def encode(self, path: str, value: Any) -> Tree | None:
        """Returns the tree for an object with a state, a torch tensor or a JAX array, or else None.

        A value cannot be a tensor of a framework that has not been imported.
        """
        if (known := self._paths.get(id(value))) is not None:
            return {KIND: "object", "path": known}
        torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
        if torch is not None and isinstance(value, torch.Tensor):
            block, strides = _of_torch().block_of(value, path)
            tree = {KIND: "tensor", "name": self._put(path, block)}
            return tree if strides is None else {**tree, "strides": strides}
        if jax is not None and isinstance(value, jax.Array):
            return {KIND: "jax", "array": encode(_as_numpy(value, path), path, self)}
        return None

    def decode(self, tree: dict[str, Any]) -> Any:
        """Decodes a tree that encode() of this class returned."""
        if tree[KIND] == "object":
            return self._objects[tree["path"]]
        if tree[KIND] == "tensor":
            return _of_torch().tensor_of(self.found[tree["name"]], tree.get("strides"))
        if tree[KIND] == "jax":
            import jax.numpy

            return jax.numpy.asarray(decode(tree["array"], self))
        raise TypeError(f"unknown kind {tree[KIND]!r}")

    def _put(self, path: str, block: TensorBlock) -> str:
        while path in self.found or path == METADATA:
            path += "'"
        self.found[path] = block
        return path


def _as_numpy(value: Any, path: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as reason:  # e.g. a PRNG key or a deleted array
        raise TypeError(f"state, {path}: {reason}") from reason


def encode(value: Any, path: str, blocks: Blocks) -> Tree:
    """Encodes a value as a tree. Its arrays become blocks whose names start with `path`.

    Raises TypeError, whose text names the path, for an unsupported type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if (tree := blocks.encode(path, value)) is not None:
        return tree
    if (kind is np.ndarray or issubclass(kind, np.generic)) and _name_of(value.dtype):
        return _array(value, path, blocks)
    if kind is bytes or kind is bytearray:
        flat = np.array(bytearray(value), np.uint8)
        return {KIND: kind.__name__, "name": blocks.put(path, flat)}
    if kind is complex:
        return {KIND: "complex", "parts": [value.real, value.imag]}
    if kind is list or kind in _GROUPS.values():
        ordered = (
            sorted(value, key=repr) if kind in (set, frozenset) else value
        )  # the same order on all ranks
        members = [encode(x, f"{path}.{i}", blocks) for i, x in enumerate(ordered)]
        return members if kind is list else {KIND: kind.__name__, "members": members}
    if _is_named_tuple(kind):
        fields = zip(kind._fields, value, strict=True)
        members = [encode(x, f"{path}.{name}", blocks) for name, x in fields]
        return {KIND: "named", "class": kind.__name__, "members": members}
    if kind is dict and KIND not in value and all(type(key) is str for key in value):
        return {key: encode(x, f"{path}.{key}", blocks) for key, x in value.items()}
    if kind in _DICTS.values():
        pairs = [
            [encode(key, f"{path}.key", blocks), encode(x, f"{path}.{key}", blocks)]
            for key, x in value.items()
        ]
        tree = {KIND: kind.__name__, "pairs": pairs}
        if hasattr(value, "_metadata"):  # in a state_dict, this holds modules' versions
            tree["metadata"] = encode(value._metadata, f"{path}.metadata", blocks)
        return tree
    raise TypeError(
        f"state, {path}: a commit file can't hold type {kind.__name__} without pickling; it can "
        "hold objects with state_dict() and load_state_dict(), tensors of PyTorch, arrays of NumPy "
        "and JAX, numbers, texts, bytes, None, and dicts, lists, tuples and sets of these"
    )


def decode(tree: Tree, blocks: Blocks, like: Any = None) -> Any:
    """Decodes a tree. `like` is the value that the result will replace. It provides the classes of
    named tuples.

    Raises one of Python's built-in errors if `tree` is malformed.
    """
    if isinstance(tree, list):
        return [decode(x, blocks, _member(like, i)) for i, x in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(KIND)
    if kind is None:
        return {key: decode(x, blocks, _entry(like, key)) for key, x in tree.items()}
    if kind in ("array", "number"):
        flat = blocks.take(tree["name"]).view(_dtype(tree["dtype"]))
        array = flat.reshape(tree["shape"])
        return array if kind == "array" else array[()]
    if kind in ("bytes", "bytearray"):
        data = blocks.take(tree["name"]).tobytes()
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(*tree["parts"])
    if kind in _GROUPS:
        return _GROUPS[kind](
            decode(x, blocks, _member(like, i)) for i, x in enumerate(tree["members"])
        )
    if kind == "named":
        return _named(tree, blocks, like)
    if kind in _DICTS:
        return _dict(tree, blocks, like)
    return blocks.decode(tree)


def _dict(tree: dict[str, Any], blocks: Blocks, like: Any) -> Any:
    keys = [decode(key, blocks) for key, _ in tree["pairs"]]
    pairs = [
        (key, decode(x, blocks, _entry(like, key)))
        for key, (_, x) in zip(keys, tree["pairs"], strict=True)
    ]
    kind = tree[KIND]
    value = _DICTS[kind](pairs if kind != "Counter" else dict(pairs))
    if "metadata" in tree:
        value._metadata = decode(tree["metadata"], blocks)  # type: ignore[attr-defined]
    return value


def _named(tree: dict[str, Any], blocks: Blocks, like: Any) -> Any:
    members = tree["members"]
    kind = type(like)
    fits = kind.__name__ == tree["class"] and _is_named_tuple(kind)
    if not fits or len(kind._fields) != len(members):
        raise TypeError(
            f"the file has a named tuple {tree['class']}, but the program has a "
            f"{kind.__name__}: start with a value of the same class"
        )
    return kind(*(decode(x, blocks, like[i]) for i, x in enumerate(members)))


def _array(value: Any, path: str, blocks: Blocks) -> Tree:
    array = np.array(value, order="C")
    name = blocks.put(path, array.reshape(-1).view(np.uint8))
    what = "array" if isinstance(value, np.ndarray) else "number"
    shape = [int(n) for n in array.shape]
    return {KIND: what, "dtype": _name_of(array.dtype), "shape": shape, "name": name}


def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns a name from which _dtype() can get the dtype, or "" for all dtypes other than NumPy's
    plain ones and those in _NAMED."""
    if dtype.name in _NAMED and dtype.isnative:
        return str(dtype.name)
    return "" if dtype.kind in "OV" or dtype.num >= _FIRST_FOREIGN else dtype.str


def _dtype(name: str) -> np.dtype[Any]:
    if name in _NAMED:
        import ml_dtypes  # is installed, because libraries that create such arrays need it

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
