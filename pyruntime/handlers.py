# SPDX-License-Identifier: Apache-2.0
"""Saves and restores objects that have a state, such as optimizers, among the values of an elastic
State. elastic.py uses this module on the training thread.

A handler saves and restores such an object's state in place. The values around the object are
deep-copied, but the copies refer to the same object. If the object were copied as well, a copied
scheduler would change a copied optimizer.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, Generic, TypeVar

import cloudpickle

from farandole.commits import Part, Saved
from farandole.objects import allgather_object, broadcast_object

T = TypeVar("T", bound=Any)

# Types whose values have no parts. Deep copies share these values.
_ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, NoneType, type),
        *(FunctionType, BuiltinFunctionType, ModuleType),
    }
)
_WITHOUT_ORDER = (set, frozenset)


class StateHandler(Generic[T]):
    """Saves, restores and synchronises one object through its state_dict().

    For objects that need more than that, derive a class and register() it. All methods are called
    on the training thread. sync() is a collective, so every rank of the world must call it in the
    same order.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.saved: Any = None
        self.save()

    def save(self) -> None:
        """Keeps a deep copy of the object's state."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Loads the last saved state into the object."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Copies rank 0's state to all ranks, then saves it. Collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))
        self.save()

    def reset(self) -> None:
        """Hook that is called after a restart. The number of ranks may have changed."""

    def set_value(self, value: T) -> None:
        """Replaces the object, then saves its state."""
        self.value = value
        self.save()


registry: list[tuple[type, type[StateHandler[Any]]]] = []  # the first type that matches is used


def handler_of(value: Any) -> type[StateHandler[Any]] | None:
    """Returns the handler class for an object, or None for a plain value, which needs none."""
    if type(value) in _ATOMS or isinstance(value, type):
        return None
    for kind, handler in registry:
        if isinstance(value, kind):
            return handler
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return StateHandler if all(map(callable, methods)) else None


def find_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Finds the objects within `values` that have a handler. Returns them by path.

    Searches everything that copy.deepcopy() would copy, in the same order on all ranks. Raises
    TypeError if a set holds several such objects, because sets have no order.
    """
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # by id; holding the objects prevents reuse of their ids

    def look(path: str, value: Any) -> None:
        if handler_of(value) is not None:
            if found.setdefault(path, value) is not value:
                raise TypeError(
                    f"state, {path}: a set holds several objects that ranks could not tell apart; "
                    "use a list"
                )
        elif id(value) not in seen:
            seen[id(value)] = value
            for name, part in _parts(value):
                if type(part) not in _ATOMS:
                    look(f"{path}.{name}", part)

    for name, value in values.items():
        look(name, value)
    return found


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (name, part) for each object that copy.deepcopy() would copy along with `value`."""
    kind = type(value)
    if kind in (dict, list, tuple, *_WITHOUT_ORDER):
        yield from _members(value)
    elif kind is MethodType:
        yield "self", value.__self__
    elif hasattr(kind, "__deepcopy__"):
        yield from getattr(value, "__dict__", {}).items()
    else:
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:
            return  # copy.deepcopy() will raise the same error
        if isinstance(reduced, tuple):
            _, arguments, state, *items = (*reduced, None, None)[:5]
            states = state if type(state) is tuple else (state,)
            for part in (arguments, *states):
                yield from _members(part)
            for more in items:
                yield from _members(dict(more) if more is items[-1] and more else list(more or ()))


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    kind = type(value)
    if kind is dict:
        for i, (key, member) in enumerate(value.items()):
            yield (key if type(key) is str else repr(key) if type(key) in _ATOMS else i), member
            yield f"key {i}", key
    elif kind in (list, tuple):
        yield from enumerate(value)
    elif kind in _WITHOUT_ORDER:
        yield from (("member", member) for member in value)


class Handlers:
    """The handlers for a state's objects. Each exists as long as the state contains its object."""

    def __init__(self) -> None:
        self._found: dict[str, StateHandler[Any]] = {}  # keyed by the object's first path

    def _by_object(self) -> dict[int, StateHandler[Any]]:
        return {id(handler.value): handler for handler in self._found.values()}

    def save(self, values: dict[str, Any], only: Any = None) -> Saved:
        """Saves the objects within `values`, then returns copy(values). If `only` is given, saves
        only this object; the other objects keep their last saved states."""
        before, self._found = self._by_object(), {}
        for path, value in _firsts(find_objects(values)).items():
            handler = before.get(id(value))
            if handler is None:
                handler = _made(value)
            elif only is None or value is only:
                handler.save()
            self._found[path] = handler
        return self.copy(values)

    def copy(self, values: dict[str, Any]) -> Saved:
        """Deep-copies the values and adds the states that the handlers have saved."""
        objects = {id(handler.value): handler.value for handler in self._found.values()}
        parts = {path: Part(x.value, x.saved) for path, x in self._found.items()}
        return Saved(copy.deepcopy(values, objects), parts)

    def restore(self, saved: Saved) -> dict[str, Any]:
        """Restores the objects' states. Returns a copy of the values."""
        before, self._found = self._by_object(), {}
        for path, (value, state) in saved.parts.items():
            handler = self._found[path] = before.get(id(value)) or _made(value)
            handler.saved = state
            handler.restore()
        return self.copy(saved.values).values

    def reset(self) -> None:
        """Resets all handlers. Called after a restart."""
        for handler in self._found.values():
            handler.reset()

    def sync(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns rank 0's values, with this rank's objects in place of rank 0's. Loads rank 0's
        states into these objects.

        Collective. Raises ValueError on all ranks if any rank lacks an object that rank 0 has.
        """
        before, own = self._by_object(), find_objects(values)
        root = broadcast_object(_Transfer(values, own), 0, name="farandole.elastic.objects")
        missing = [
            f"state, {path}: rank 0 has a {kind} there, and this rank "
            + (f"a {_name(own[path])}" if path in own else "none")
            for path, kind in root.kinds.items()
            if path not in own or _name(own[path]) != kind
        ]
        answers = allgather_object(missing, name="farandole.elastic.missing")
        for rank, texts in enumerate(answers):
            if texts:
                raise ValueError(
                    f"rank {rank}: {texts[0]}; remedy: create the same objects on all ranks before "
                    "training, because farandole sends only their states"
                )
        self._found = {x: before.get(id(own[x])) or _made(own[x]) for x in root.kinds}
        for handler in self._found.values():
            handler.sync()
        return root.values(own)


def _firsts(found: Mapping[str, Any]) -> dict[str, Any]:
    paths: dict[int, str] = {}
    for path, value in found.items():
        paths.setdefault(id(value), path)
    return {path: found[path] for path in paths.values()}


def _made(value: Any) -> StateHandler[Any]:
    handler = handler_of(value)
    assert handler is not None
    return handler(value)


def _name(value: Any) -> str:
    return type(value).__qualname__


class _Transfer:
    """Pickles rank 0's values without the objects that have a state; receivers insert theirs."""

    def __init__(self, values: Any, found: Mapping[str, Any], data: bytes = b"") -> None:
        firsts = _firsts(found)
        self._values, self._data = values, data
        self._paths = {id(value): path for path, value in firsts.items()}
        self.kinds = {path: _name(value) for path, value in firsts.items()}

    def __reduce__(self) -> Any:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.paths = self._paths
        pickler.dump(self._values)
        return _received, (file.getvalue(), self.kinds)

    def values(self, own: Mapping[str, Any]) -> dict[str, Any]:
        if not self._data:
            return dict(self._values)
        unpickler = _Unpickler(io.BytesIO(self._data))
        unpickler.own = own
        return dict(unpickler.load())


def _received(data: bytes, kinds: dict[str, str]) -> _Transfer:
    transfer = _Transfer(None, {}, data)
    transfer.kinds = kinds
    return transfer


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    paths: dict[int, str]

    def persistent_id(self, value: Any) -> str | None:
        return self.paths.get(id(value))


class _Unpickler(pickle.Unpickler):
    own: Mapping[str, Any]

    def persistent_load(self, path: Any) -> Any:
        return self.own[path]


def register(kinds: Iterable[tuple[type, type[StateHandler[Any]]]]) -> None:
    """Registers handler classes for types of objects."""
    registry.extend(kinds)
