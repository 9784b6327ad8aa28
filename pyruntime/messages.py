# SPDX-License-Identifier: Apache-2.0
"""The public calls send and recv, which pass messages between two ranks of a process set. They may
be called from any thread.

A send matches a receive that has the same process set, ranks and `tag`. If there are several, they
match in the order of each rank's calls. A small message may arrive before a large one that was sent
earlier. Both ends need the same dtype and number of elements, but shapes may differ. Ranks are
numbered within the process set. `name` appears only in errors and traces. If the ends disagree,
both raise MismatchError. If a rank has died, left or joined, the other end raises PeerError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import index
from typing import Any, TypeVar

from farandole._library import ffi
from farandole.arrays.buffers import Buffer
from farandole.calls import prepared
from farandole.calls.arguments import ARGUMENTS
from farandole.calls.handles import Handle, OneHandle, value_of
from farandole.calls.leases import lend
from farandole.calls.prepared import RepeatedCall
from farandole.calls.public_call import collective, wait_for, waiting
from farandole.calls.requests import Call, Op, PreparedCall, refuse_all, submit, told
from farandole.members import ProcessSet, denoted, global_process_set, members_of, set_id
from farandole.ops.starts import describe, handle_of

__all__ = ["recv", "recv_async", "send", "send_async"]

_ANY = -1
_C = TypeVar("_C", bound=Callable[..., Any])


def _known(op: Op, peer: str) -> Any:
    """Returns a function that lists the call to refuse at the other end, if that is known."""

    def calls(given: dict[str, Any]) -> list[Call]:
        rank, tag, name = given.get(peer), given.get("tag", 0), given.get("name")
        sets = denoted(given.get("process_set", global_process_set))
        wrong = any(ARGUMENTS[a].fault(given.get(a, 0)) for a in (peer, "tag"))
        if wrong or len(sets) != 1 or (rank is not None and rank >= len(members_of(sets[0]))):
            return []
        name = None if ARGUMENTS["name"].fault(name) else name
        root = _ANY if rank is None else members_of(sets[0])[rank]
        return [Call(op, name, sets[0], root=root, tag=index(tag))]

    return calls


class _Again(RepeatedCall):
    """A message that is repeated with the same arguments and an array of the same form on a CPU."""

    __slots__ = ("_collect", "_source", "_what")

    def __init__(
        self, call: Call, array: Any, buffer: Buffer, source: int | None, first: Handle[Any]
    ) -> None:
        """`source` is the sender's rank in the process set, if known. `first` is the first call's
        handle."""
        super().__init__(call, array, buffer, call.op is Op.RECEIVE, first._timeout)
        self._plain = False
        self._source = source
        self._what, self._collect = first._what, first._collect

    def _start(
        self,
        call: PreparedCall,
        submit: Callable[[Any, Any], int],
        array: Any,
        pointer: Any,
        memory: object,
    ) -> Handle[Any]:
        nothing = ffi.NULL if self._kind.gives_pointers else 0
        if not self._in_place:
            number = lend(submit, pointer, nothing, memory)
            return OneHandle(number, None, self._what, self._timeout)
        number = lend(submit, nothing, pointer, memory)
        if self._source is not None:
            return OneHandle(number, self._source, self._what, self._timeout)
        return Handle((number,), self._collect, self._what, self._timeout)


def _repeating(start: _C) -> _C:
    return prepared.repeating(start, by_name=False)


@_repeating
@collective(Op.SEND, calls=_known(Op.SEND, "destination"))
def send_async(
    tensor: Any,
    destination: int,
    *,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[None]:
    """Starts to send an array to rank `destination`, which must call recv. Returns a handle.

    A send matches the receive that has the same process set, ranks and `tag`, in the order of
    calls. Both ends need the same dtype and number of elements, but shapes may differ. Do not write
    to the array until the handle is done, which may take until the receive is posted. wait()
    returns None.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - destination: a rank of the process set.
    - tag: an int from 0 to 2**63 - 1, equal at both ends.
    - name: appears only in errors and traces.
    - process_set: the set within which ranks are numbered, by default the world.
    - timeout: seconds until a wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> if hvd.size() > 1 and hvd.rank() == 0:
        ...     hvd.send_async(np.arange(3), destination=1, tag=7).wait()
        >>> if hvd.rank() == 1:
        ...     hvd.recv(np.empty(3, int), source=0, tag=7)
    """
    _, (buffer,) = describe([tensor], in_place=False)
    root = _world_rank("destination", destination, process_set)
    call = Call(Op.SEND, name, set_id(process_set), root=root, tag=index(tag))
    what = f"{call} to rank {destination} with tag {tag}"
    handle: Handle[None] = handle_of(
        submit(call, [buffer], own=2), [buffer], [tensor], lambda _: None, what, timeout
    )
    if buffer.device < 0:
        handle.prepared = _Again(call, tensor, buffer, None, handle)
    return handle


@_repeating
@collective(Op.RECEIVE, calls=_known(Op.RECEIVE, "source"))
def recv_async(
    tensor: Any,
    source: int | None = None,
    *,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[int]:
    """Starts to receive a message from rank `source` into `tensor`. Returns a handle.

    A receive matches the send that has the same process set, ranks and `tag`, in the order of
    calls. Both ends need the same dtype and number of elements, but shapes may differ. Do not touch
    the array until the handle is done. wait() returns the sender's rank in the process set.

    - tensor: a contiguous, writable array of integers, floats, bool or complex, on a CPU or GPU.
    - source: a rank of the process set. None accepts a message from any rank.
    - tag: an int from 0 to 2**63 - 1, equal at both ends.
    - name: appears only in errors and traces.
    - process_set: the set within which ranks are numbered, by default the world.
    - timeout: seconds until a wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> if hvd.size() > 1 and hvd.rank() == 0:
        ...     hvd.send(np.arange(3), destination=1, tag=7)
        >>> if hvd.rank() == 1:
        ...     sender = hvd.recv_async(np.empty(3, int), tag=7).wait()
    """
    _, (buffer,) = describe([tensor], in_place=True)
    root = _ANY if source is None else _world_rank("source", source, process_set)
    call = Call(Op.RECEIVE, name, set_id(process_set), root=root, tag=index(tag))
    ranks = members_of(set_id(process_set))
    what = f"{call} from {'any rank' if source is None else f'rank {source}'} with tag {tag}"
    numbers = submit(call, [replace(buffer, pointer=0)], [buffer], own=2)
    collect = lambda done: ranks.index(value_of(done[0]))  # noqa: E731
    handle: Handle[int] = handle_of(numbers, [buffer], [tensor], collect, what, timeout)
    if buffer.device < 0:
        known = None if source is None else index(source)
        handle.prepared = _Again(call, tensor, buffer, known, handle)
    return handle


def refuse_receive(reason: Exception, source: int | None, **terms: Any) -> Exception:
    """Tells the sender why this rank cannot receive, and returns the error to raise. `terms` holds
    the other arguments of recv_async(). Used by adapters that receive into a copy."""
    refuse_all(_known(Op.RECEIVE, "source")({"source": source, **terms}), reason)
    return told(reason)


def _world_rank(what: str, rank: int, process_set: ProcessSet) -> int:
    ranks = members_of(set_id(process_set))
    if index(rank) < len(ranks):
        return ranks[rank]
    raise ValueError(f"{what} is {rank}: the process set has ranks 0 to {len(ranks) - 1}")


@waiting(Op.SEND, calls=_known(Op.SEND, "destination"))
@_repeating
def send(
    tensor: Any,
    destination: int,
    *,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> None:
    """Sends an array to rank `destination` of the process set, which must receive it with recv.

    A send matches the receive that has the same process set, ranks and `tag`, in the order of
    calls. Both ends need the same dtype and number of elements, but shapes may differ. Returns when
    you may write to the array again, which may take until the receive is posted.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - destination: a rank of the process set.
    - tag: an int from 0 to 2**63 - 1, equal at both ends.
    - name: appears only in errors and traces.
    - process_set: the set within which ranks are numbered, by default the world.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> if hvd.size() > 1 and hvd.rank() == 0:
        ...     hvd.send(np.arange(3), destination=1, tag=7)
        >>> if hvd.rank() == 1:
        ...     hvd.recv(np.empty(3, int), source=0, tag=7)
    """
    terms: Any = {"tag": tag, "name": name, "process_set": process_set, "timeout": timeout}
    return wait_for(send_async(tensor, destination, **terms))


@waiting(Op.RECEIVE, calls=_known(Op.RECEIVE, "source"))
@_repeating
def recv(
    tensor: Any,
    source: int | None = None,
    *,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Receives a message from rank `source` into `tensor`. Returns the sender's rank.

    A receive matches the send that has the same process set, ranks and `tag`, in the order of
    calls. Both ends need the same dtype and number of elements, but shapes may differ.

    - tensor: a contiguous, writable array of integers, floats, bool or complex, on a CPU or GPU.
    - source: a rank of the process set. None accepts a message from any rank.
    - tag: an int from 0 to 2**63 - 1, equal at both ends.
    - name: appears only in errors and traces.
    - process_set: the set within which ranks are numbered, by default the world.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> if hvd.size() > 1 and hvd.rank() == 0:
        ...     hvd.send(np.arange(3), destination=1, tag=7)
        >>> if hvd.rank() == 1:
        ...     sender = hvd.recv(np.empty(3, int), tag=7)
    """
    terms: Any = {"tag": tag, "name": name, "process_set": process_set, "timeout": timeout}
    return wait_for(recv_async(tensor, source, **terms))
