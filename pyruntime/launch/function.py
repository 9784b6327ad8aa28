# SPDX-License-Identifier: Apache-2.0
"""farandole.run(), which calls a Python function on new ranks, from a script or a notebook.

One thread watches the launcher, and another thread copies the launcher's output.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import cloudpickle

from farandole.config import home_for_mpi
from farandole.errors import FarandoleError, PeerError, ShutdownError, StallError, warn
from farandole.launch.commands import find
from farandole.launch.job import Job, parse_hostfile, parse_hosts
from farandole.launch.programs import own
from farandole.launch.result_server import KEY, Outcome, ResultServer

R = TypeVar("R")
_GRACE = 5.0  # seconds within which the launcher must end and the last results must arrive


class _OnRank(Exception):
    """The cause of the exception that run() raises. Names the rank and shows its traceback."""


def run(
    function: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    launcher: str = "auto",
    launcher_args: Sequence[str] = (),
    start_timeout: float = 120.0,
    executable: str | None = None,
    verbose: bool = False,
) -> list[R]:
    """Calls `function(*args, **kwargs)` on `np` new ranks. Returns the results in rank order.

    Starts the ranks as `farandole run` does. `hosts`, `hostfile` and `launcher_args` are the same
    as its options --hosts, --hostfile and --mpi-args. `environment` is set for all ranks. The
    function itself must call farandole.init(). The function and the results are pickled with
    cloudpickle, so you may define them in a notebook. The ranks' output appears in this process. If
    `verbose` is True, the launcher's command is printed as well. `executable` is the Python program
    of the ranks, by default this process's. All ranks must start within `start_timeout` seconds.

    Raises the function's exception, with the rank and its traceback as the cause. If several ranks
    raise, chooses the first exception that does not report another rank's end. Raises PeerError if
    a rank ends without a result, StallError if ranks start too late, and ValueError if an argument
    is wrong.

    Examples:
        >>> def train(epochs):
        ...     import farandole as hvd
        ...
        ...     hvd.init()
        ...     return hvd.rank(), epochs
        >>> farandole.run(train, (3,), np=2)  # doctest: +SKIP
        [(0, 3), (1, 3)]
    """
    if np < 1:
        raise ValueError(f"farandole.run(np={np}): np must be at least 1")
    if hosts and hostfile:
        raise ValueError("farandole.run(): pass hosts or hostfile, not both")
    found = parse_hosts(hosts) if hosts else ()
    job = Job(
        command=(),
        ranks=np,
        hosts=parse_hostfile(Path(hostfile)) if hostfile else found,
        environment=dict(environment or {}),
        extra=tuple(launcher_args),
    )
    how = find(launcher)
    work = pickle.dumps((sys.path, cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))))
    with ResultServer(np, work, job.here) as server:
        words = own("farandole.launch.rank", server.address, python=executable or sys.executable)
        job = replace(job, command=tuple(words), environment={**job.environment, KEY: server.key})
        with home_for_mpi():
            outer = how.environment(job)
        code = _start(how.command(job), outer, server, start_timeout, verbose)
        server.wait(_GRACE)
        return _results(server.outcomes, np, code)


# ---- the launcher


def _start(
    command: list[str],
    environment: dict[str, str],
    server: ResultServer,
    timeout: float,
    verbose: bool,
) -> int:
    """Runs the launcher until it ends. Returns the launcher's exit code."""
    if verbose:
        print(subprocess.list2cmdline(command), file=sys.stderr)
    piped = not _writes_to_terminal()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else None,
        stderr=subprocess.STDOUT if piped else None,
        text=True,
        errors="replace",
    )
    copier = threading.Thread(target=_copy, args=(process.stdout,), daemon=True)
    try:
        with _ended_with_the_block(process):
            copier.start()
            _wait_for_start(process, server, timeout)
            return process.wait()
    finally:
        if copier.is_alive():
            copier.join(_GRACE)


def _writes_to_terminal() -> bool:
    """Returns True if print() writes to descriptor 1, so that ranks can write there as well.

    Returns False in a notebook.
    """
    try:
        return sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return False


def _copy(lines: IO[str] | None) -> None:
    if lines is not None:
        with lines:
            for line in lines:
                print(line, end="", flush=True)


@contextlib.contextmanager
def _ended_with_the_block(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()  # MPI's launchers then end the ranks
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_start(process: subprocess.Popen[str], server: ResultServer, timeout: float) -> None:
    """Waits until all ranks have connected or the launcher has ended.

    Raises StallError if ranks are missing after `timeout` seconds.
    """

    def watch() -> None:
        process.wait()
        with server.changed:
            server.changed.notify_all()

    threading.Thread(target=watch, daemon=True).start()
    deadline = time.monotonic() + timeout
    ranks = set(range(server.ranks))
    with server.changed:
        server.changed.wait_for(
            lambda: server.here >= ranks or process.returncode is not None,
            max(0.0, deadline - time.monotonic()),
        )
        missing = sorted(ranks - server.here)
    if missing and process.poll() is None:
        raise StallError(
            f"ranks {missing} have not started within {timeout:g} s (start_timeout); remedy: see "
            "the launcher's output, or try its command: farandole run --verbose"
        )


# ---- results


def _results(outcomes: dict[int, Outcome], ranks: int, code: int) -> list[Any]:
    failures = [(r, *_error(r, outcome)) for r, outcome in outcomes.items() if outcome.failure]
    of_others = (PeerError, ShutdownError)
    failures.sort(key=lambda failure: isinstance(failure[1], of_others))  # a stable sort
    missing = sorted(set(range(ranks)) - set(outcomes))
    if failures and not (missing and isinstance(failures[0][1], of_others)):
        _, error, cause = failures[0]
        raise error from cause
    if missing:
        raise PeerError(
            f"ranks {missing} ended without a result; the launcher's exit code is {code}; see its "
            "output"
        )
    if code != 0:
        warn(f"the launcher ended with exit code {code} after all results came", UserWarning)
    return [pickle.loads(outcomes[rank].data) for rank in range(ranks)]


def _error(rank: int, outcome: Outcome) -> tuple[BaseException, _OnRank]:
    cause = _OnRank(f"on rank {rank}:\n{outcome.failure}")
    try:
        error = pickle.loads(outcome.data)
    except Exception:  # the error's class may exist only on the ranks
        error = None
    if not isinstance(error, BaseException):
        error = FarandoleError(outcome.failure.strip().splitlines()[-1])
    error.rank = rank
    if hasattr(error, "add_note"):
        error.add_note(f"raised on rank {rank} of farandole.run()")
    return error, cause
