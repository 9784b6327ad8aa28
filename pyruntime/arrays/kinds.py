# SPDX-License-Identifier: Apache-2.0
"""The interface between collective calls and array libraries. Each family of arrays has a Kind.

Each adapter is a package that derives a class from Kind and registers an instance on import. The
adapter's entry point in the group "farandole.adapters" has the same name as the framework's
top-level module. By that name, farandole finds and imports the adapter when it first sees one of
the framework's arrays. docs/adapters.md is the guide. Everything here, including the methods of a
Kind, may be called from any thread.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.arrays.buffers import Buffer

Shape = tuple[int, ...]


class Stream(int):
    """A CUDA stream's handle. It keeps the stream's owner alive, and so the stream."""

    owner: object

    def __new__(cls, number: int, owner: object) -> Stream:
        """`owner` is an object that keeps the stream alive."""
        made = super().__new__(cls, number)
        made.owner = owner
        return made


class Kind(ABC):
    """One family of arrays.

    Methods receive arrays that `matches` has accepted or `empty` has returned. Several threads may
    call methods at once. No method waits for other ranks.
    """

    gives_pointers = False  # True if lent() returns cffi pointers instead of ints

    @abstractmethod
    def matches(self, x: Any) -> bool:
        """True if `x` belongs to this kind. farandole caches the answer for the type of `x`."""

    @abstractmethod
    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """Describes the memory of `x`, or of a contiguous copy if `x` is not contiguous.

        If `in_place`, raises ValueError for arrays that are read-only or would have to be copied.
        Raises TypeError for a dtype or layout that the core does not support. The Buffer's owner
        keeps the memory alive until the call has ended.
        """

    def lent(
        self, x: Any, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> tuple[Any, object]:
        """A faster version of describe() for arrays that are sent repeatedly.

        Returns (address, object that keeps the memory alive) if `x` has this dtype, shape and
        device, and describe() would not copy `x`. Otherwise returns (0, None). `device` is compared
        with x.device. None means the CPU.
        """
        return 0, None

    def stream(self, x: Any) -> int:
        """Returns the CUDA stream in which the caller now uses arrays such as `x`, or 0 on the CPU.

        If the stream may be destroyed, returns a Stream, which keeps the stream alive. This matters
        because results are freed in the order of the stream, possibly long after the call.
        """
        return 0

    @abstractmethod
    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """Returns a new contiguous array with the dtype and device of `like`. If `shape` is None,
        the array also has the shape of `like`. The core writes a result to the array, and the user
        gets sealed(result, like)."""

    def sealed(self, result: Any, like: Any) -> Any:
        """Converts an array that empty() made and the core has filled to the user's array.

        Libraries with read-only arrays override this. The empty() of such a library makes a
        writable stand-in, such as a NumPy array, and its describe() must also accept the stand-in.
        """
        return result

    def gives_itself(self) -> bool:
        """True if sealed() is not overridden, so that the user gets the array that empty() made."""
        return type(self).sealed is Kind.sealed

    @abstractmethod
    def wrap(self, memory: Any, like: Any) -> Any:
        """Wraps a result's memory in an array with the dtype of `like`, without a copy if possible.

        `memory` is a buffers.ResultMemory on the CPU and a cuda_array.CudaArray on a GPU.
        """


_kinds: list[Kind] = []  # the first kind that matches is used
_by_type: dict[type, Kind] = {}


def register(kind: Kind, place: int = 0) -> None:
    """Inserts a kind at `place`, by default before all others. Adapters call this on import."""
    _kinds.insert(place, kind)
    _by_type.clear()


def kind_of(x: Any) -> Kind:
    """Returns the kind of an array. Imports the adapter for the array's framework if there is one.

    Raises TypeError if `x` is not an array or its adapter cannot be imported.
    """
    type_ = type(x)
    kind = _by_type.get(type_)
    if kind is None:
        kind = _find(x)
        _by_type[type_] = kind
    return kind


def _find(x: Any) -> Kind:
    for base in type(x).__mro__:
        framework = base.__module__.partition(".")[0]
        if framework in _adapters():
            import_adapter(framework)
    for kind in _kinds:
        if kind.matches(x):
            return kind
    raise TypeError(
        f"{type(x).__name__} is not an array: pass a NumPy array, a tensor, or an object with "
        f"__array_interface__ or DLPack (for numbers: {_of_numbers()}; for bytes: numpy.frombuffer)"
    )


def _of_numbers() -> str:
    """Returns code that converts a number to an array of the framework that the program uses."""
    makers = {"torch": "torch.tensor(x)", "jax": "jax.numpy.asarray(x)"}
    makers["tensorflow"] = "tensorflow.constant(x)"
    used = (text for name, text in makers.items() if f"farandole.{name}" in sys.modules)
    return next(used, "numpy.asarray(x)")


@functools.cache
def _adapters() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="farandole.adapters")}


def import_adapter(framework: str) -> None:
    """Imports a framework's adapter, which registers its kinds. Raises TypeError on failure."""
    adapter = _adapters()[framework]
    try:
        adapter.load()
    except Exception as reason:
        raise TypeError(
            f"can't import farandole's adapter for {adapter.name}, {adapter.value}: {reason}"
        ) from reason
