# SPDX-License-Identifier: Apache-2.0
"""The process that all ranks are forked from: it has imported what takes long, and not farandole.

`python -m strangers.zygote SOCKET` connects there and forks the ranks of one world after another.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import cffi
import torch

_PR_SET_PDEATHSIG = 1


def main(address: str) -> None:
    """Answers ("world", environments, folder) with the ranks' pids, ("ended", pid) with how."""
    _warm_up()
    home = Client(address, "AF_UNIX")
    home.send("zygote")
    while True:
        try:
            word, *arguments = home.recv()
        except EOFError:
            return
        if word == "ended":
            home.send(_how_ended(arguments[0]))
            continue
        shared = mmap.mmap(-1, mmap.PAGESIZE)
        environments, folder = arguments
        pids = []
        for rank, environment in enumerate(environments):
            pid = os.fork()
            if pid == 0:
                home.close()
                _become(rank, len(environments), address, environment, Path(folder), shared)
            pids.append(pid)
        home.send(pids)


def _warm_up() -> None:
    """What torch and cffi import at their first use."""
    torch.set_num_threads(1)
    cffi.FFI().cdef("int f(int);")
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.zeros(2)
    torch.optim.SGD([p], lr=1.0).step()


def _how_ended(pid: int) -> int:
    """As os.waitstatus_to_exitcode; the caller has seen it end, or kills it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(
    rank: int, ranks: int, address: str, environment: dict[str, str], folder: Path, shared: Any
) -> None:
    """This fork is a rank from here on."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        connection = Client(address, "AF_UNIX")
        connection.send(rank)
        _serve(connection, rank, ranks, shared)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(connection: Connection, rank: int, ranks: int, shared: Any) -> None:
    """Programs, one after another; each in a job of its own."""
    import farandole as fd
    from strangers.loop_rank import LoopRunner
    from strangers.loops import Loop
    from strangers.plan import plan
    from strangers.rank import CallRunner, calibrate
    from strangers.stage import Stage

    stage = Stage(shared, rank, ranks)
    fd.init()
    calibrate()
    fd.shutdown()
    gc.freeze()  # what has been imported costs every collection a tenth of a second
    while True:
        try:
            program = connection.recv()
        except EOFError:
            return
        stage.begin()
        stage.now("init()")
        fd.init()
        runner: Any
        if isinstance(program, Loop):
            runner = LoopRunner(program, rank, ranks, stage)
        else:
            runner = CallRunner(plan(program, ranks), rank, stage)
        try:
            runner.run()
            stage.now("shutdown()")
            with stage.blocked():
                fd.shutdown()
            stage.now("after shutdown()")
            runner.after_shutdown()
        except BaseException:
            connection.send(("failed", stage.doing, traceback.format_exc(), runner.found))
            raise
        stage.end()
        connection.send_bytes(pickle.dumps(("done", runner.found)))


if __name__ == "__main__":
    main(sys.argv[1])
