# SPDX-License-Identifier: Apache-2.0
"""Public checks that a value is equal on all ranks. Ranks send only a digest if it is equal."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from farandole.calls.public_call import errors_reach_peers
from farandole.equality import fingerprint
from farandole.errors import MismatchError, printable, ranks_text
from farandole.members import ProcessSet, global_process_set
from farandole.objects import allgather_object
from farandole.ops import allgather

T = TypeVar("T")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # part of some reprs; addresses differ between processes


def same_on_all_ranks(
    value: T,
    name: str = "same_on_all_ranks",
    process_set: ProcessSet = global_process_set,
) -> T:
    """Raises MismatchError on all ranks if a value differs between them, and otherwise returns it.

    Arrays are equal if their dtypes, shapes and bytes are equal. Lists, dicts, dataclasses and
    objects with a state_dict() are compared item by item. Anything else is compared by its repr.
    The call costs a small allgather and copies GPU arrays to the host.

    - value: the value to compare. All ranks of the set must make the call.
    - name: appears in errors. Ranks compare values of the same name.
    - process_set: the ranks that compare values. Other ranks return at once.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, and
    TypeError for a function, because a function's repr does not identify its code.

    Examples:
        >>> hvd.same_on_all_ranks({"seed": 7}, name="settings")
        {'seed': 7}
    """
    if inspect.isroutine(value):
        with errors_reach_peers(process_set, name):
            raise TypeError(
                "same_on_all_ranks compares values: pass the function's arguments, or its result"
            )
    _compare(value, name, process_set)
    return value


def _compare(value: Any, name: str, process_set: ProcessSet) -> None:
    if not process_set.included() or process_set.size() == 1:
        return
    with errors_reach_peers(process_set, name):
        mine = dict(_leaves(value, "value"))
    if equal_on_all_ranks(sorted(mine.items()), name, process_set):
        return
    theirs = allgather_object(mine, name=f"{name}.values", process_set=process_set)
    known = {r: one for r, one in zip(process_set.ranks or [], theirs, strict=True) if one}
    for path in dict.fromkeys(path for one in known.values() for path in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in known.items():
            ranks.setdefault(one.get(path, "missing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{one:.120} on {ranks_text(who)}" for one, who in ranks.items())
            differs = printable(f"{path} is {values}")
            raise MismatchError(f"'{name}' differs between ranks: {differs}")


def equal_on_all_ranks(
    value: Any, name: str, process_set: ProcessSet, timeout: float | None = None
) -> bool:
    """True if the value's repr is equal on all ranks. Costs one small allgather of digests."""
    text = repr(value).encode(errors="surrogatepass")
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int64)
    digests = allgather(digest[None], name=name, process_set=process_set, timeout=timeout)
    return bool((digests == digests[:1]).all())


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields (path, text) for each leaf of a nested value. Equal leaves have equal texts."""
    items: Any = []
    if (array := _array_text(value)) is not None:
        yield path, array
    elif isinstance(value, Mapping):
        items = [(f"[{_text(key)}]", value[key]) for key in value]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range)):
        items = [(f"[{i}]", one) for i, one in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f".{one.name}", getattr(value, one.name)) for one in dataclasses.fields(value)]
    elif hasattr(value, "state_dict") and not isinstance(value, type):
        items = [(".state_dict()", value.state_dict())]
    if items:
        yield f"len({path})", str(len(items))
    elif array is None:
        yield path, _text(value)
    for step, one in items:
        yield from _leaves(one, path + step)


def _text(value: Any) -> str:
    if isinstance(value, (set, frozenset)):  # a set's order differs between processes
        return f"{type(value).__name__}({sorted(map(_text, value))})"
    return _ADDRESS.sub("", repr(value))


def _array_text(value: Any) -> str | None:
    """Returns an array's first values, dtype, shape and fingerprint, or None for other values."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
        flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        summary = f"{value.dtype}{tuple(value.shape)} {fingerprint(flat.data_ptr(), flat.nbytes)}"
        return f"{flat[:6].tolist()} ({summary})"
    if isinstance(value, np.generic) or not hasattr(value, "__array__"):
        return None
    kind, source = getattr(value, "dtype", None), value
    if str(kind).startswith("key<"):  # a key of jax.random.key(); NumPy has no such dtype
        source = sys.modules["jax"].random.key_data(value)
    try:
        array = np.asarray(source.get() if hasattr(source, "__cuda_array_interface__") else source)
    except (TypeError, NotImplementedError) as reason:
        raise TypeError(
            f"same_on_all_ranks: this {type(value).__name__} has no values yet; remedy: compare "
            "outside of jit and tf.function"
        ) from reason
    if array.dtype.hasobject:  # the bytes would be the objects' addresses
        return f"{array.dtype}{array.shape} {_text(array.tolist())}"
    whole = np.ascontiguousarray(array)
    summary = f"{kind or array.dtype}{array.shape} {fingerprint(whole.ctypes.data, whole.nbytes)}"
    return f"{array.reshape(-1)[:6].tolist()} ({summary})"
