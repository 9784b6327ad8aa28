# SPDX-License-Identifier: Apache-2.0
"""Broadcasts a model's arrays before training. farandole.numpy and farandole.cupy publish these
calls, and the torch adapter uses some of the functions.

A model is either an array of any framework that has an adapter, or a dict or list of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

from farandole.agreement import equal_on_all_ranks
from farandole.arrays.buffers import turns
from farandole.arrays.kinds import kind_of
from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.errors import ranks_text
from farandole.members import ProcessSet, global_process_set
from farandole.objects import allgather_object
from farandole.ops import broadcast_async_

PARAMETERS = "broadcast_parameters"  # default name of broadcast_parameters' calls
_MOST_NAMES = 5  # most parameters that an error lists


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def items(arrays: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, array) pairs in the same order on all ranks: dicts by key, lists by position.

    The name is the array's path, such as "encoder.weights.0". If a list holds a (name, array) pair,
    that name replaces the position in the path.
    """
    if not isinstance(arrays, (Mapping, list, tuple)):
        yield name, arrays
        return
    members: Iterable[tuple[Any, Any]]
    if isinstance(arrays, Mapping):
        members = sorted(arrays.items(), key=lambda member: str(member[0]))
    else:
        members = (pair if _is_pair(pair) else (i, pair) for i, pair in enumerate(arrays))
    for key, value in members:
        yield from items(value, f"{name}.{key}" if name else str(key))


def root_in(root_rank: int, process_set: ProcessSet) -> int:
    """Returns the root as an int. Raises ValueError if the root is not a member of the set."""
    members = process_set.ranks or []
    if index(root_rank) not in members:
        raise ValueError(f"root_rank is {root_rank}: pass a member of the process set, {members}")
    return index(root_rank)


def agree_on_parameters(
    names: Sequence[str],
    root_rank: int,
    call: str,
    process_set: ProcessSet,
    timeout: float | None = None,
) -> None:
    """Raises ValueError on all ranks if names or roots differ between ranks. Collective."""
    mine = list(names), root_rank
    if equal_on_all_ranks(mine, call, process_set, timeout):
        return
    theirs = allgather_object(mine, f"{call}.names", process_set, timeout=timeout)
    known = {r: one for r, one in zip(process_set.ranks or [], theirs, strict=True) if one}
    roots = {rank: root for rank, (_, root) in known.items()}
    if len(set(roots.values())) > 1:
        texts = ", ".join(f"{root} on rank {rank}" for rank, root in roots.items())
        raise ValueError(f"root_rank is {texts}: pass the same rank on all ranks")
    different = _differences({rank: names for rank, (names, _) in known.items()})
    raise ValueError(f"params: ranks have different parameters: {different}")


def _differences(known: dict[int, list[str]]) -> str:
    """Returns a text that names the ranks that lack a parameter. If no rank lacks one, the text
    names two ranks that have the parameters in different orders."""
    lacking: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for names in known.values() for name in names):
        ranks = [rank for rank, names in known.items() if name not in names]
        if ranks:
            lacking.setdefault(ranks_text(ranks), []).append(repr(name))
    if not lacking:
        first, *others = known
        rank = next(rank for rank in others if known[rank] != known[first])
        return f"their order on {ranks_text([first, rank])} differs"
    texts = []
    for who, names in lacking.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        texts.append(f"missing on {who}: {', '.join(names[:_MOST_NAMES])}{more}")
    return "; ".join(texts)


def broadcast_all(
    named: Sequence[tuple[str, Any]], root: int, process_set: ProcessSet, timeout: float | None
) -> None:
    """Broadcasts named arrays in place and waits for all broadcasts. Raises the first failure.

    If arrays share memory, as tied weights do, the broadcast of each starts only when the previous
    one has ended. All other broadcasts start at once. This cannot deadlock, even if ranks tie
    different arrays. After a failure, the remaining broadcasts still run, so that no peer waits.
    """
    handles: list[Handle[Any] | None] = [None] * len(named)
    failures: list[Exception] = []

    def start(i: int) -> None:
        name, array = named[i]
        try:
            handles[i] = broadcast_async_(array, root, name, process_set, timeout=timeout)
        except Exception as reason:
            failures.append(reason)

    def wait(i: int) -> None:
        handle, handles[i] = handles[i], None
        try:
            if handle is not None:
                handle.wait()
        except Exception as reason:
            failures.append(reason)

    before = turns([kind_of(array).describe(array) for _, array in named])
    for i in range(len(named)):
        if i not in before:
            start(i)
    for i in before:
        wait(before[i])
        start(i)
    for i in range(len(named)):
        wait(i)
    if failures:
        raise failures[0]


@collective(Op.ALLGATHER, unnamed=PARAMETERS)
def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> None:
    """Overwrites each array with the root's values, in place. Arrays may have any dtypes and
    shapes.

    If several threads make such calls, give each call a `name`. If one rank has an error, all ranks
    raise it. The error is a TypeError for members that are not arrays, a ValueError for arrays that
    can't be written in place and for different names or roots, and a MismatchError for different
    shapes or dtypes.

    - params: an array, or a nested dict or list of arrays or (name, array) pairs.
    - root_rank: the sender's rank in the world. It must be a member of the process set.
    - process_set: the ranks that take part, by default all.
    - name: prefix of the calls' names. None uses one prefix for all such calls.
    - timeout: seconds until each wait raises StallError. None means no limit.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> parameters = {"weight": np.ones((2, 3)), "bias": np.zeros(2)}
        >>> hvd.broadcast_parameters(parameters, root_rank=0)
    """
    root, pairs, ways = root_in(root_rank, process_set), list(items(params)), set[str]()
    for way, array in pairs:
        if way in ways:
            raise ValueError(f"params holds {way!r} twice: give each array its own name")
        ways.add(way)
        try:
            kind_of(array).describe(array, in_place=True)
        except (TypeError, ValueError) as reason:
            raise type(reason)(f"params{f' at {way!r}' if way else ''}: {reason}") from reason
    prefix = "parameter" if name is None else name

    def meet() -> None:
        names = [way for way, _ in pairs]
        agree_on_parameters(names, root, PARAMETERS if name is None else name, process_set, timeout)
        named = [(f"{prefix}.{way}", array) for way, array in pairs]
        broadcast_all(named, root, process_set, timeout)

    return then(meet)
