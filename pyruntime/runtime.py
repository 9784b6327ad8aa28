# SPDX-License-Identifier: Apache-2.0
"""Starting and leaving: init() and shutdown()."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from farandole import bootstrap, leaving, prometheus, requests, stacks
from farandole._library import check_count, ffi, lib
from farandole._library import error as core_error
from farandole.errors import ShutdownError
from farandole.installed import nvidia_folders
from farandole.leases import sweep
from farandole.process_sets import ProcessSet, add_process_set, forget_all
from farandole.topology import local_size

__all__ = ["init", "shutdown"]

_BLOB_CAPACITY = 1 << 16  # bytes
_SLICE = 0.15  # seconds between looks at Python's signals
_lock = threading.RLock()
_job: bootstrap.Bootstrap | None = None
_forked = False


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts the runtime on every rank; collective. Does nothing where it runs already.

    `comm`: None or [] for all ranks of the job, a list of ranks, or an mpi4py communicator, which
    is duplicated. `process_sets`: sets to register at once; "dynamic" is accepted, sets always are.
    Raises the same error on all ranks where one cannot start; ValueError for wrong arguments.
    """
    global _job
    with _lock:
        if _job is not None:
            return
        if _forked:
            raise ShutdownError(
                "this process is a fork of one that used farandole: start it by "
                "multiprocessing's 'spawn' to call farandole in it"
            )
        sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
        job = bootstrap.connect(comm)
        try:
            _start(job, sets)
        except BaseException as reason:
            prometheus.stop()
            lib.farandole_shutdown(1, leaving.describe(reason).encode(), 1.0)
            job.close(failed=False, broken=False)
            raise
        _job = job
        requests.restart()
        leaving.install(_leave)
        job.on_finalize(leaving.leave_now)
        for process_set in sets:
            add_process_set(process_set)
        if job.rank == 0:
            _advise()


def _start(job: bootstrap.Bootstrap, sets: list[ProcessSet]) -> None:
    """Brings the core up, on all ranks or on none."""
    capacity = _BLOB_CAPACITY
    blob = ffi.new("char[]", capacity)
    failure: Exception | None = None
    length = 0
    try:
        stacks.install()
        lib.farandole_library_folders(":".join(nvidia_folders()).encode())
        length = check_count(lib.farandole_prepare(blob, capacity))
        _check_distinct(sets)
    except Exception as reason:
        failure = reason
    ranks = [None if s.mpi_comm is not None else s.ranks for s in sets]
    met = _agree(job, failure, (ranks, bytes(ffi.buffer(blob, length))))
    different = [r for r, (theirs, _) in enumerate(met) if theirs != met[0][0]]
    if different:
        raise ValueError(
            f"init(process_sets=...): rank 0 gives {met[0][0]}, rank {different[0]} gives "
            f"{met[different[0]][0]}"
        )
    failure = None
    blobs = [blob for _, blob in met]
    leader = _with_world(job, job.node, blobs, lib.farandole_knock)
    if leader < 0:
        failure = core_error(-leader)
    node = _agree(job, failure, leader)
    if code := _with_world(job, node, blobs, lib.farandole_start):
        failure = core_error(code)
    else:
        try:
            prometheus.serve()
        except (ImportError, OSError) as reason:
            failure = reason
    _agree(job, failure, None)


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


def _agree(job: bootstrap.Bootstrap, failure: Exception | None, data: Any) -> list[Any]:
    """What each rank brings as `data`; where one failed, all raise the first one's error."""
    answers = [pickle.loads(x) for x in job.allgather(pickle.dumps((failure, data)))]
    failures = [(rank, error) for rank, (error, _) in enumerate(answers) if error is not None]
    if failures:
        texts: dict[str, list[int]] = {}
        for rank, error in failures:
            texts.setdefault(leaving.describe(error), []).append(rank)
        text = "; ".join(f"rank {', '.join(map(str, ranks))}: {t}" for t, ranks in texts.items())
        raise type(failures[0][1])(f"farandole.init() failed on {text}") from failure
    return [theirs for _, theirs in answers]


def _check_distinct(sets: list[ProcessSet]) -> None:
    ranks = [tuple(s.ranks) for s in sets if s.ranks is not None]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"init(process_sets=...): the same set twice in {ranks}")


def shutdown() -> None:
    """Leaves the job: waits for the other ranks to do so too. init() may follow. Idempotent.

    Work under way ends with ShutdownError or PeerError.
    """
    _leave("", False)


def _leave(cause: str, failed: bool) -> None:
    """The one way out, of shutdown() and of all that ends the process. Idempotent."""
    global _job
    with _lock:
        job, _job = _job, None
        if job is None:
            return
        prometheus.stop()
        broken = bool(lib.farandole_broken())
        code = lib.FARANDOLE_PENDING
        while code == lib.FARANDOLE_PENDING:  # in slices, so that Ctrl-C gets through
            code = lib.farandole_shutdown(int(bool(cause)), cause.encode(), _SLICE)
        failure = core_error(code) if code != lib.FARANDOLE_OK else None
        forget_all()
        sweep()
        job.close(failed, broken)
    if failure is not None and not failed:
        raise failure


def _after_fork() -> None:
    global _job, _forked, _lock
    _forked = _forked or _job is not None
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
            stacklevel=3,
        )
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 1
    if threads > 1 and threads * local > max(mine, cores):
        warnings.warn(
            f"{local} ranks of {threads} torch threads each share {cores} cores; remedy: "
            f"torch.set_num_threads({max(1, cores // local)}) or OMP_NUM_THREADS",
            RuntimeWarning,
            stacklevel=3,
        )
