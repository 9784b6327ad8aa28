# SPDX-License-Identifier: Apache-2.0
"""Starts and ends a rank's part in its job with init(), shutdown() and restart(). A lock admits one
thread at a time. The hooks that run at the end of the process also call this module."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from farandole._library import check_count, ffi, lib
from farandole._library import error as core_error
from farandole.calls import leases, part, requests
from farandole.calls.handles import SLICE
from farandole.config import without_effect
from farandole.errors import RETRIED, FarandoleError, StallError, warn
from farandole.installed import nvidia_folders
from farandole.members import ProcessSet
from farandole.observe import flight, stacks
from farandole.process_sets import add_process_set, forget_all, know_communicators
from farandole.start import agent_client, bootstrap, leaving, limits, unmet
from farandole.topology import local_size, not_initialized

_BLOB_CAPACITY = 1 << 16  # bytes
_START_EXTRA = 10.0  # seconds that are added because ranks start the core at different times
_lock = threading.RLock()
_job: bootstrap.Bootstrap | None = None
_comm: Any = None  # the argument `comm` of the last init()
_goodbyes: bootstrap.Goodbyes | None = None  # how the ranks left the last job
_ended = ""  # reason why this rank's elastic training has ended, or ""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts the runtime on every rank. Collective. Does nothing if the runtime is running.

    - comm: None or [] for all ranks of the job, a list of ranks, or an mpi4py communicator.
      farandole duplicates the communicator.
    - process_sets: sets to register. "dynamic" is accepted, but sets are always dynamic.

    If one rank can't start, all ranks raise the same error and none is initialised. Raises
    ValueError for wrong arguments. Raises StallError, which names the missing ranks, if some ranks
    are still missing after FARANDOLE_INIT_TIMEOUT. Raises PeerError if a rank has ended or has
    announced that it will not come. Raises ShutdownError in a child process of a rank.

    Examples:
        >>> hvd.init()
        >>> hvd.is_initialized()
        True
    """
    with _lock:
        while _job is None:
            try:
                _meet(comm, process_sets)
            except RETRIED as reason:
                if not agent_client.retries_init(reason):
                    raise


def _meet(comm: Any, process_sets: Any) -> None:
    global _job, _comm, _ended, _goodbyes
    unmet.mark_met()
    with limits.typed():
        if agent_client.connect() is not None:
            leaving.install(_end)
        job = bootstrap.connect(comm, _goodbyes)
    agreement = _Agreement(job)
    try:
        sets = _start(agreement, process_sets)
        _job, _comm, _ended = job, comm, ""
        requests.restart()
        leaving.install(_end)
        job.on_finalize(leaving.leave_now)
        agreement.agree(_register(sets), None)
        _goodbyes = None
    except BaseException as reason:
        _job = None
        _undo(agreement, reason)
        raise


class _Agreement:
    """Makes each step of one init() succeed either on all ranks or on none."""

    def __init__(self, job: bootstrap.Bootstrap) -> None:
        self.job = job
        self.agreed = False  # True once all ranks raise the same error

    def agree(
        self, failure: Exception | None, data: Any, seconds: float | None = None
    ) -> list[Any]:
        """Allgathers `data` as JSON. If any rank passes a failure, all ranks raise an error of the
        class of the first failure."""
        error = None if failure is None else (_kind(failure), leaving.describe(failure))
        met = self.job.allgather(json.dumps((error, data)).encode(), seconds)
        try:
            answers = [json.loads(answer) for answer in met]
        except ValueError as reason:
            raise FarandoleError(
                f"init(): this rank received an invalid message: {reason}"
            ) from reason
        texts: dict[str, list[int]] = {}
        kinds: list[str] = []
        for rank, (error, _) in enumerate(answers):
            if error is not None:
                kinds.append(error[0])
                texts.setdefault(error[1], []).append(rank)
        if kinds:
            self.agreed = True
            text = "; ".join(f"rank {', '.join(map(str, r))}: {t}" for t, r in texts.items())
            kind = _KINDS.get(kinds[0], FarandoleError)
            raise kind(f"farandole.init() failed on {text}") from failure
        return [theirs for _, theirs in answers]


# Error classes that exist on every rank and whose constructors take a text.
_KNOWN: list[type[Exception]] = [ValueError, TypeError, ImportError, OSError, Warning]
_KNOWN += [FarandoleError, *FarandoleError.__subclasses__()]
_KINDS = {kind.__name__: kind for kind in _KNOWN}


def _kind(error: Exception) -> str:
    """Returns the name of the error's closest class that is in _KNOWN."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind in _KNOWN)
    return next(known, FarandoleError.__name__)


def _undo(agreement: _Agreement, reason: BaseException) -> None:
    with contextlib.suppress(Exception):  # the caller raises `reason`
        _leave_core(leaving.describe(reason))
    forget_all()
    if agreement.agreed:
        goodbye = bootstrap.Goodbye(bootstrap.Rejoin.MAYBE, leaving.describe(reason))
        agreement.job.close(goodbye, failed=False, broken=False)
    else:
        agreement.job.abandon(reason)


def _register(sets: list[ProcessSet]) -> Exception | None:
    try:
        for process_set in sets:
            add_process_set(process_set)
    except Exception as reason:
        return reason
    return None


def _start(agreement: _Agreement, process_sets: Any) -> list[ProcessSet]:
    """Starts the core on all ranks or on none. Returns the process sets to register next."""
    job = agreement.job
    capacity = _BLOB_CAPACITY
    blob = ffi.new("char[]", capacity)
    failure: Exception | None = None
    length = 0
    sets: list[ProcessSet] = []
    try:
        stacks.install()
        lib.farandole_library_folders(":".join(nvidia_folders()).encode())
        length = check_count(lib.farandole_prepare(blob, capacity))
        sets = _sets_of(process_sets)
        for process_set in sets:
            if process_set.mpi_comm is not None:
                job.world_ranks(process_set.mpi_comm)
    except Exception as reason:
        failure = limits.of_machine(reason)
    ranks = [None if s.mpi_comm is not None else s.ranks for s in sets]
    met = agreement.agree(failure, (ranks, bytes(ffi.buffer(blob, length)).hex(), requests.world()))
    different = [r for r, (theirs, _, _) in enumerate(met) if theirs != met[0][0]]
    if different:
        agreement.agreed = True
        raise ValueError(
            f"init(process_sets=...): rank 0 passes {met[0][0]}, rank {different[0]} passes "
            f"{met[different[0]][0]}; pass the same sets on all ranks"
        )
    failure = None
    blobs = [bytes.fromhex(theirs) for _, theirs, _ in met]
    before = [number for _, _, number in met]
    requests.enter(job.number or 1 + max(before), before)
    key = ffi.new("char[]", job.key(requests.world(), blobs))
    leader = _with_world(job, job.node, blobs, key, lib.farandole_probe)
    if leader < 0:
        failure = core_error(-leader)
    node = agreement.agree(failure, leader)
    if code := _with_world(job, node, blobs, key, lib.farandole_start):
        failure = core_error(code)
    else:
        try:
            if job.rank == 0:
                _advise()
        except (OSError, Warning) as reason:
            failure = limits.of_machine(reason)
    agreement.agree(failure, None, 2 * job.seconds + _START_EXTRA)
    return sets


def _with_world(
    job: bootstrap.Bootstrap,
    node: list[int],
    blobs: list[bytes],
    key: Any,
    call: Callable[[Any], int],
) -> int:
    """Builds the core's description of the world and returns call(world)."""
    keep = [ffi.new("char[]", blob) for blob in blobs]
    places = ffi.new("int32_t[]", node)
    table = ffi.new("char*[]", keep)
    lengths = ffi.new("int32_t[]", [len(blob) for blob in blobs])
    world = ffi.new(
        "farandole_world*",
        {
            "rank": job.rank,
            "size": job.size,
            "node": places,
            "blobs": ffi.cast("char const* const*", table),
            "blob_bytes": lengths,
            "mpi_comm": ffi.cast("void*", job.comm_address()),
            "number": requests.world(),
            "key": key,
        },
    )
    return int(call(world))


def _sets_of(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    sets = list(process_sets) if isinstance(process_sets, Sequence) else [process_sets]
    if isinstance(process_sets, str) or not all(isinstance(s, ProcessSet) for s in sets):
        raise TypeError(
            f"init(process_sets={process_sets!r}): pass a list of "
            "farandole.ProcessSet, or 'dynamic'"
        )
    ranks = [tuple(s.ranks) for s in sets if s.ranks is not None]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"init(process_sets=...): the list contains the same set twice: {ranks}")
    return sets


def shutdown() -> None:
    """Leaves the job and waits until the other ranks have also left. May be called repeatedly, and
    init() may be called afterwards.

    Pending calls fail with ShutdownError or PeerError. After FARANDOLE_SHUTDOWN_TIMEOUT, this rank
    stops waiting, and StallError names the ranks that have not left. Ctrl-C also ends the wait.

    Examples:
        >>> hvd.shutdown()
        >>> hvd.init()
    """
    _leave(bootstrap.Goodbye(bootstrap.Rejoin.MAYBE, _ended), False)


def restart() -> None:
    """Calls shutdown() and init() on the same ranks. Collective. Used by elastic training.

    Raises the errors of init(). Raises StallError if a rank hangs and does not leave within
    FARANDOLE_INIT_TIMEOUT. Raises PeerError, which names the rank and its reason, if a rank does
    not come back.
    """
    leave_for_restart(_job.seconds if _job is not None else None)
    init(_comm)


def leave_for_restart(limit: float | None = None) -> None:
    """Leaves the job in order to join the next one at once.

    After `limit` seconds, stops waiting for the other ranks and raises StallError. If `limit` is
    None, waits in the same way as shutdown().
    """
    _leave(bootstrap.Goodbye(bootstrap.Rejoin.NOW), False, limit=limit)


def exit_timeout() -> float:
    """Returns the number of seconds that ranks may take to leave the present or last world."""
    return _job.seconds if _job is not None else 0.0


def world() -> int:
    """Returns the number of the present or last world in this job. Worlds are counted from 1; the
    number is 0 before the first one."""
    return requests.world()


def end_training(cause: str) -> None:
    """Records why this rank's elastic training is over. Peers that restart get this reason."""
    global _ended
    _ended = cause


def _end(cause: str, failed: bool) -> None:
    if failed:
        agent_client.report_failure(cause, issubclass(leaving.kind() or object, RETRIED))
    else:
        _warn_if_unused()
    _leave(bootstrap.Goodbye(bootstrap.Rejoin.NEVER, cause or _ended), failed, cause)
    if not failed:
        agent_client.report_end()


def _warn_if_unused() -> None:
    """Warns if this rank is one of several and ends without having made a collective call, because
    it may have trained alone."""
    if _job is None or _job.size == 1 or requests.world() > 1:
        return
    if lib.farandole_broken() or part.has_ended():
        return
    if flight.own_page()["counters"]["tensors_submitted"] == 0:
        print(
            f"farandole: rank {_job.rank} of {_job.size} ends without a single collective call. If "
            "it trained a model, it trained alone. Remedy: wrap the optimizer in "
            "DistributedOptimizer, or average gradients with allreduce()",
            file=sys.stderr,
            flush=True,
        )


def _leave_core(cause: str, limit: float | None = None) -> Exception | None:
    """Stops the core and returns its error or None. `cause` tells why this rank failed, or is
    ""."""
    deadline = float("inf") if limit is None else time.monotonic() + limit
    while True:  # each wait is short, so that Ctrl-C works
        code = lib.farandole_shutdown(int(bool(cause)), cause.encode(), SLICE)
        if code != lib.FARANDOLE_PENDING:
            part.restart()
            break
        if time.monotonic() > deadline:
            raise StallError(
                f"elastic training: other ranks did not leave within {limit:g} s, so no rank can "
                "restart; remedy: look for a rank that hangs or is stopped; FARANDOLE_INIT_TIMEOUT "
                "sets how long the others wait"
            )
    return core_error(code) if code != lib.FARANDOLE_OK else None


def _leave(
    goodbye: bootstrap.Goodbye, failed: bool, cause: str = "", limit: float | None = None
) -> None:
    """Leaves the job, if this rank has not left. Called by shutdown() and when the process ends."""
    global _job, _goodbyes
    with _lock:
        job, broken = _job, False
        if job is None:
            return
        interrupt: BaseException | None = None
        failure: Exception | None = None
        left = False
        while not left:  # after Ctrl-C, the wait is short, and further ones do not end it
            try:
                broken |= bool(lib.farandole_broken()) or part.has_ended()
                if interrupt is None:
                    requests.leave()
                failure = _leave_core(cause, limit)
                left = True
            except BaseException as reason:  # Ctrl-C, or the limit has passed, so stop waiting
                if interrupt is not None and isinstance(reason, Exception):
                    raise  # no Ctrl-C, so a further attempt would fail as well
                interrupt = interrupt or reason
                cause, limit = leaving.describe(interrupt), None
        if _job is job:  # else a signal handler has called this function meanwhile
            forget_all()
            if not lib.farandole_initialized():  # otherwise the core's threads may still use memory
                leases.restart()
            broken |= failure is not None or interrupt is not None
            _job = None  # last, because a shutdown() that Ctrl-C interrupts may be repeated
            _goodbyes = job.close(goodbye, failed, broken)
    if interrupt is not None:
        raise interrupt
    if failure is not None and not failed:
        raise failure


def _after_fork() -> None:
    global _job, _lock
    _job = None
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def world_ranks(comm: Any) -> list[int]:
    """Returns the world ranks of an mpi4py communicator, in ascending order. Raises ValueError if
    some of its ranks are not known."""
    if _job is None:
        raise not_initialized()
    return _job.world_ranks(comm)


know_communicators(world_ranks)


def current_bootstrap() -> bootstrap.Bootstrap | None:
    """Returns the bootstrap through which the ranks have met, or None before init()."""
    return _job


def _advise() -> None:
    """Warns about settings without effect, slow CPU binding and too many threads. Rank 0 calls
    it."""
    texts = [without_effect(os.environ)]
    cores, mine, local = os.cpu_count() or 1, len(os.sched_getaffinity(0)), local_size()
    if mine == 1 and cores // local > 1:
        texts.append(
            "the launcher has bound all threads of this process to one core; remedy: run "
            "`mpirun --bind-to none` (or `--map-by ppr:1:socket --bind-to socket`)"
        )
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 1
    if threads > 1 and threads * local > max(mine, cores):
        texts.append(
            f"{local} ranks with {threads} torch threads each share {cores} cores; remedy: call "
            f"torch.set_num_threads({max(1, cores // local)}) or OMP_NUM_THREADS"
        )
    for text in filter(None, texts):
        warn(text, RuntimeWarning)
