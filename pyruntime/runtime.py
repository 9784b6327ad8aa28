# SPDX-License-Identifier: Apache-2.0
"""Starting and leaving: init() and shutdown()."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from farandole._library import check_count, ffi, lib
from farandole._library import error as core_error
from farandole.calls import leases, requests
from farandole.errors import FarandoleError
from farandole.installed import nvidia_folders
from farandole.observe import prometheus, stacks
from farandole.process_sets import ProcessSet, add_process_set, forget_all
from farandole.start import bootstrap, leaving
from farandole.topology import local_size

__all__ = ["init", "shutdown"]

_BLOB_CAPACITY = 1 << 16  # bytes
_SLICE = 0.15  # seconds between looks at Python's signals
_START_EXTRA = 10.0  # seconds: while some meet in the core, others wait for the outcome already
_lock = threading.RLock()
_job: bootstrap.Bootstrap | None = None
_comm: Any = None  # of the last init()
_parting: bootstrap.Parting | None = None  # how the ranks left the last job
_ended = ""  # why this rank's elastic training has


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts the runtime on every rank; collective. Does nothing where it runs already.

    `comm`: None or [] for all ranks of the job, a list of ranks, or an mpi4py communicator, which
    is duplicated. `process_sets`: sets to register at once; "dynamic" is accepted, sets always are.
    Raises the same error on all ranks where one cannot start, and then nothing is initialised;
    ValueError for wrong arguments; within FARANDOLE_INIT_TIMEOUT StallError, naming the ranks that
    do not come, or PeerError for those that told that they will not; ShutdownError in a process
    that is only the child of a rank.
    """
    global _job, _comm, _ended, _parting
    with _lock:
        if _job is not None:
            return
        job = bootstrap.connect(comm, _parting)
        meeting = _Meeting(job)
        try:
            sets = _start(meeting, process_sets)
            _job, _comm, _ended = job, comm, ""
            requests.restart()
            leaving.install(_end)
            job.on_finalize(leaving.leave_now)
            meeting.agree(_register(sets), None)
            _parting = None
        except BaseException as reason:
            _job = None
            _undo(meeting, reason)
            raise


class _Meeting:
    """How far the ranks have come together."""

    def __init__(self, job: bootstrap.Bootstrap) -> None:
        self.job = job
        self.agreed = False  # on an error, that all of them raise

    def agree(
        self, failure: Exception | None, data: Any, seconds: float | None = None
    ) -> list[Any]:
        """What each rank brings as `data`; where one failed, all raise the first one's error."""
        told = None if failure is None else (_kind(failure), leaving.describe(failure))
        answers = [pickle.loads(x) for x in self.job.allgather(pickle.dumps((told, data)), seconds)]
        texts: dict[str, list[int]] = {}
        kinds: list[type[Exception]] = []
        for rank, (error, _) in enumerate(answers):
            if error is not None:
                kinds.append(error[0])
                texts.setdefault(error[1], []).append(rank)
        if kinds:
            self.agreed = True
            text = "; ".join(f"rank {', '.join(map(str, r))}: {t}" for t, r in texts.items())
            raise kinds[0](f"farandole.init() failed on {text}") from failure
        return [theirs for _, theirs in answers]


# Classes that every rank knows, and that take a text.
_KINDS = {*FarandoleError.__subclasses__(), ValueError, TypeError, ImportError, OSError, Warning}


def _kind(error: Exception) -> type[Exception]:
    """The nearest of them."""
    return next((kind for kind in type(error).__mro__ if kind in _KINDS), FarandoleError)


def _undo(meeting: _Meeting, reason: BaseException) -> None:
    """After an init() that failed: nothing stays initialised, and nobody waits for this rank."""
    prometheus.stop()
    with contextlib.suppress(Exception):  # `reason` is the error to raise
        _leave_core(leaving.describe(reason))
    forget_all()
    if meeting.agreed:
        goodbye = bootstrap.Farewell(bootstrap.Coming.PERHAPS, leaving.describe(reason))
        meeting.job.close(goodbye, failed=False, broken=False)
    else:
        meeting.job.abandon(reason)


def _register(sets: list[ProcessSet]) -> Exception | None:
    try:
        for process_set in sets:
            add_process_set(process_set)
    except Exception as reason:
        return reason
    return None


def _start(meeting: _Meeting, process_sets: Any) -> list[ProcessSet]:
    """Brings the core up, on all ranks or on none; the sets to register then."""
    job = meeting.job
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
        failure = reason
    ranks = [None if s.mpi_comm is not None else s.ranks for s in sets]
    met = meeting.agree(failure, (ranks, bytes(ffi.buffer(blob, length))))
    different = [r for r, (theirs, _) in enumerate(met) if theirs != met[0][0]]
    if different:
        meeting.agreed = True
        raise ValueError(
            f"init(process_sets=...): rank 0 gives {met[0][0]}, rank {different[0]} gives "
            f"{met[different[0]][0]}"
        )
    failure = None
    blobs = [blob for _, blob in met]
    leader = _with_world(job, job.node, blobs, lib.farandole_knock)
    if leader < 0:
        failure = core_error(-leader)
    node = meeting.agree(failure, leader)
    if code := _with_world(job, node, blobs, lib.farandole_start):
        failure = core_error(code)
    else:
        try:
            prometheus.serve()
            if job.rank == 0:
                _advise()
        except (ImportError, OSError, Warning) as reason:
            failure = reason
    meeting.agree(failure, None, 2 * job.seconds + _START_EXTRA)
    return sets


def _with_world(
    job: bootstrap.Bootstrap, node: list[int], blobs: list[bytes], call: Callable[[Any], int]
) -> int:
    """What `call` answers, given who the ranks are, which share hosts, and what they wrote."""
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
        },
    )
    return int(call(world))


def _sets_of(process_sets: Any) -> list[ProcessSet]:
    """init()'s argument, checked."""
    if process_sets is None or process_sets == "dynamic":
        return []
    sets = list(process_sets) if isinstance(process_sets, Sequence) else [process_sets]
    if isinstance(process_sets, str) or not all(isinstance(s, ProcessSet) for s in sets):
        raise TypeError(
            f"init(process_sets={process_sets!r}): a list of farandole.ProcessSet, or 'dynamic'"
        )
    ranks = [tuple(s.ranks) for s in sets if s.ranks is not None]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"init(process_sets=...): the same set twice in {ranks}")
    return sets


def shutdown() -> None:
    """Leaves the job: waits for the other ranks to do so too. init() may follow. Idempotent.

    Work under way ends with ShutdownError or PeerError. After FARANDOLE_SHUTDOWN_TIMEOUT this rank
    leaves alone, and StallError names those that have not; Ctrl-C makes it leave at once.
    """
    _leave(bootstrap.Farewell(bootstrap.Coming.PERHAPS, _ended), False)


def restart() -> None:
    """shutdown() and init() of the same ranks at once, for elastic training; collective.

    Raises PeerError, naming the rank and why it left, where one does not do so too, and what init()
    raises.
    """
    _leave(bootstrap.Farewell(bootstrap.Coming.ANEW), False)
    init(_comm)


def end_training(cause: str) -> None:
    """This rank's elastic training is over: what its peers hear if they start anew meanwhile."""
    global _ended
    _ended = cause


def _end(cause: str, failed: bool) -> None:
    """The way out of all that ends the process."""
    _leave(bootstrap.Farewell(bootstrap.Coming.NEVER, cause or _ended), failed, cause)


def _leave_core(cause: str) -> Exception | None:
    """Until the core is gone; what it has to say about that. `cause`: of a failure; empty: none."""
    code = lib.FARANDOLE_PENDING
    while code == lib.FARANDOLE_PENDING:  # in slices, so that Ctrl-C gets through
        code = lib.farandole_shutdown(int(bool(cause)), cause.encode(), _SLICE)
    return core_error(code) if code != lib.FARANDOLE_OK else None


def _leave(farewell: bootstrap.Farewell, failed: bool, cause: str = "") -> None:
    """The one way out, of shutdown() and of all that ends the process. Idempotent."""
    global _job, _parting
    with _lock:
        job, _job = _job, None
        if job is None:
            return
        prometheus.stop()
        broken = bool(lib.farandole_broken())
        interrupt: BaseException | None = None
        try:
            failure = _leave_core(cause)
        except BaseException as reason:  # Ctrl-C: it waits no longer
            interrupt = reason
            failure = _leave_core(leaving.describe(reason))
        forget_all()
        if not lib.farandole_initialized():  # else threads of the core may still be at work
            leases.restart()
        broken |= failure is not None or interrupt is not None
        _parting = job.close(farewell, failed, broken)
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
    """This world's ranks in an mpi4py communicator, ascending. Raises ValueError where unknown."""
    if _job is None:
        raise ValueError("farandole is not initialised: call farandole.init() first")
    return _job.world_ranks(comm)


def met_by() -> bootstrap.Bootstrap | None:
    """What the ranks met by; None when not initialised."""
    return _job


def _advise() -> None:
    """Warns, on rank 0 and once, about settings that make every run slow."""
    cores, mine, local = os.cpu_count() or 1, len(os.sched_getaffinity(0)), local_size()
    if mine == 1 and cores > 1:
        warnings.warn(
            "the launcher has bound this whole process, all its threads, to one core; remedy: "
            "`mpirun --bind-to none` (or `--map-by ppr:1:socket --bind-to socket`)",
            RuntimeWarning,
            stacklevel=4,
        )
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 1
    if threads > 1 and threads * local > max(mine, cores):
        warnings.warn(
            f"{local} ranks of {threads} torch threads each share {cores} cores; remedy: "
            f"torch.set_num_threads({max(1, cores // local)}) or OMP_NUM_THREADS",
            RuntimeWarning,
            stacklevel=4,
        )
