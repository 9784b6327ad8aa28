# SPDX-License-Identifier: Apache-2.0
"""The contract of adapters: how arrays of one family reach the core. docs/adapters.md explains it.
All calls find an array's kind here, on any thread.

Each adapter is its own package. It derives a class from Kind and registers an object of it when it
is imported. It names the registering module in an entry point of the group "farandole.adapters",
under the name of its framework's top-level module: so nobody has to import it.
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
    """A CUDA stream's number that keeps the stream's owner, and so the stream, alive."""

    owner: object

    def __new__(cls, number: int, owner: object) -> Stream:
        """`owner`: while it lives, the stream is not destroyed."""
        made = super().__new__(cls, number)
        made.owner = owner
        return made


class Kind(ABC):
    """One family of arrays. Methods get arrays for which `matches` was true, or that
    its `empty` has made."""

    gives_pointers = False  # lent() returns cffi pointers, not numbers

    @abstractmethod
    def matches(self, x: Any) -> bool:
        """Whether `x` belongs to the kind; the answer holds for all objects of its type."""

    @abstractmethod
    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """The memory of `x`, or of a contiguous copy where its own is not contiguous.

        In place nothing may be copied: ValueError for arrays that are not contiguous or read-only.
        TypeError for a dtype or layout that the core has no code for.
        """

    def lent(
        self, x: Any, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> tuple[Any, object]:
        """(address of `x`, object that keeps that memory alive whatever happens to `x`), if `x` has
        this dtype and shape and describe() would not copy; else (0, None).

        It must be faster than describe(); it is called for arrays that are sent repeatedly.
        `device`: what x.device must be; None: the CPU.
        """
        return 0, None

    def stream(self, x: Any) -> int:
        """The CUDA stream in which the caller now works with arrays such as `x`; 0 on the CPU.

        A Stream where it may be destroyed: results are freed in its order, long after the call.
        """
        return 0

    @abstractmethod
    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """A new contiguous array of `like`'s dtype and device; `shape` None: of its shape too.

        The core writes a result there; the user gets what sealed() returns for it.
        """

    def sealed(self, result: Any, like: Any) -> Any:
        """The array to give to the user for `result`, which empty() made and the core has filled.

        If arrays can't be written to, empty() makes something that can, such as a NumPy array,
        which describe() has to take too. This then makes an array of it.
        """
        return result

    def gives_itself(self) -> bool:
        """Whether the user gets the very array that empty() made."""
        return type(self).sealed is Kind.sealed

    @abstractmethod
    def wrap(self, memory: Any, like: Any) -> Any:
        """An array of `like`'s dtype over a result's memory, without a copy where possible.

        `memory`: a ResultMemory, or, of arrays on a GPU, a cuda_array.CudaArray.
        """


_kinds: list[Kind] = []  # the first that matches counts
_by_type: dict[type, Kind] = {}


def register(kind: Kind, place: int = 0) -> None:
    """Adds a kind, before all others by default. Adapters call this when they are imported."""
    _kinds.insert(place, kind)
    _by_type.clear()


def kind_of(x: Any) -> Kind:
    """The kind of an array; imports the adapter of its framework, if there is one.

    Raises TypeError if `x` is not an array, and if the adapter can't be imported.
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
    """Makes an array of a number, in the framework whose part of farandole the program imported."""
    makers = {"torch": "torch.tensor(x)", "jax": "jax.numpy.asarray(x)"}
    makers["tensorflow"] = "tensorflow.constant(x)"
    used = (text for name, text in makers.items() if f"farandole.{name}" in sys.modules)
    return next(used, "numpy.asarray(x)")


@functools.cache
def _adapters() -> dict[str, EntryPoint]:
    """Entry points of adapters, by the framework's top-level module."""
    return {entry.name: entry for entry in entry_points(group="farandole.adapters")}


def import_adapter(framework: str) -> None:
    """Imports the adapter of a framework, which registers its objects.

    Raises TypeError if that fails.
    """
    adapter = _adapters()[framework]
    try:
        adapter.load()
    except Exception as reason:
        raise TypeError(
            f"farandole's adapter for {adapter.name}, {adapter.value}, can't be imported: {reason}"
        ) from reason
