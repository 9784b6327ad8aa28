# SPDX-License-Identifier: Apache-2.0
"""farandole.run(): a Python function on many ranks, from a script or a notebook."""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from farandole.errors import FarandoleError, PeerError, ShutdownError, StallError
from farandole.launch.job import Job, outer_environment, parse_hostfile, parse_hosts
from farandole.launch.launchers import find

if TYPE_CHECKING:
    from farandole.launch.home import Home, Outcome

__all__ = ["run"]

R = TypeVar("R")
_GRACE = 5.0  # seconds for a launcher to end its ranks, and for last words to arrive


class _OnRank(Exception):
    """The cause of what run() raises: the rank and its traceback."""


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
    """Calls `function(*args, **kwargs)` on `np` new ranks; their results, in rank order.

    Starts them as `farandole run` does (`hosts` and `hostfile` as its options, `launcher_args` as
    its --mpi-args; `environment` is set for all ranks). The function calls farandole.init() itself;
    it travels by cloudpickle where that is installed, so it may be of a notebook; results too.
    What the ranks print appears here. `start_timeout`: seconds until all must have started.

    Raises what the function raised, with the rank and its traceback as the cause (where several
    raise, the first that is not merely about another rank's end); PeerError where a rank ended
    without a word; StallError where ranks do not start in time; ValueError for wrong arguments.
    """
    # Late: multiprocessing remembers the module that is __main__ when it is imported.
    from farandole.launch.home import KEY, Home, pickled

    if np < 1:
        raise ValueError(f"farandole.run(np={np}): at least 1")
    if hosts and hostfile:
        raise ValueError("farandole.run(): hosts or hostfile, not both")
    found = parse_hosts(hosts) if hosts else ()
    job = Job(
        command=(),
        ranks=np,
        hosts=parse_hostfile(Path(hostfile)) if hostfile else found,
        environment=dict(environment or {}),
        extra=tuple(launcher_args),
    )
    how = find(launcher)
    work = pickle.dumps((sys.path, pickled((function, tuple(args), dict(kwargs or {})))))
    with Home(np, work, job.here) as home:
        words = (executable or sys.executable, "-m", "farandole.launch.rank", home.address)
        job = replace(job, command=words, environment={**job.environment, KEY: home.key})
        code = _start(how.command(job), outer_environment(job), home, start_timeout, verbose)
        home.settle(_GRACE)
        return _results(home.outcomes, np, code)


# ---- the launcher


def _start(
    command: list[str], environment: dict[str, str], home: Home, timeout: float, verbose: bool
) -> int:
    """Runs the launcher to its end; its exit code."""
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
    copier.start()
    try:
        with _ended_with_the_block(process):
            _wait_for_start(process, home, timeout)
            return process.wait()
    finally:
        copier.join(_GRACE)


def _writes_to_terminal() -> bool:
    """Whether the ranks may write where Python's print() does: not so in a notebook."""
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
            process.terminate()  # MPI's launchers end their ranks then
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_start(process: subprocess.Popen[str], home: Home, timeout: float) -> None:
    """Until all ranks have come, or the launcher has ended. Raises StallError."""

    def watch() -> None:
        process.wait()
        with home.changed:
            home.changed.notify_all()

    threading.Thread(target=watch, daemon=True).start()
    deadline = time.monotonic() + timeout
    ranks = set(range(home.ranks))
    with home.changed:
        home.changed.wait_for(
            lambda: home.here >= ranks or process.returncode is not None,
            max(0.0, deadline - time.monotonic()),
        )
        missing = sorted(ranks - home.here)
    if missing and process.poll() is None:
        raise StallError(
            f"ranks {missing} have not started within {timeout:g} s (start_timeout); remedy: see "
            "what the launcher printed, or try its command: farandole run --verbose"
        )


# ---- results


def _results(outcomes: dict[int, Outcome], ranks: int, code: int) -> list[Any]:
    failures = [(r, *_error(r, outcome)) for r, outcome in outcomes.items() if outcome.failure]
    of_others = (PeerError, ShutdownError)
    failures.sort(key=lambda failure: isinstance(failure[1], of_others))  # stable: by arrival
    missing = sorted(set(range(ranks)) - set(outcomes))
    if failures and not (missing and isinstance(failures[0][1], of_others)):
        _, error, cause = failures[0]
        raise error from cause
    if missing:
        raise PeerError(
            f"ranks {missing} ended without a result; the launcher's exit code is {code}, and its "
            "output says more"
        )
    if code != 0:
        warnings.warn(f"the launcher ended with {code} after all results", stacklevel=3)
    return [pickle.loads(outcomes[rank].data) for rank in range(ranks)]


def _error(rank: int, outcome: Outcome) -> tuple[BaseException, _OnRank]:
    cause = _OnRank(f"on rank {rank}:\n{outcome.failure}")
    try:
        error = pickle.loads(outcome.data)
    except Exception:  # its class may be known on the ranks only
        error = None
    if not isinstance(error, BaseException):
        error = FarandoleError(outcome.failure.strip().splitlines()[-1])
    error.rank = rank
    if hasattr(error, "add_note"):
        error.add_note(f"raised on rank {rank} of farandole.run()")
    return error, cause
