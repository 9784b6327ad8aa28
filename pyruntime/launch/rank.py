# SPDX-License-Identifier: Apache-2.0
"""What farandole.run() starts on each rank: `python -m farandole.launch.rank ADDRESS`."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback

import cloudpickle

from farandole.launch.result_server import KEY, Outcome, visit
from farandole.start import launchers


def main(address: str) -> None:
    """Fetches the function, calls it, sends its result or exception. Raises the exception too, so
    that the other ranks fail as with any failing rank."""
    with visit(address, os.environ.pop(KEY)) as server:
        server.send(launchers.launched_rank())
        work = server.recv_bytes()
        try:
            search_path, function = pickle.loads(work)
            sys.path[:] = [*search_path, *(x for x in sys.path if x not in search_path)]
            call, args, kwargs = pickle.loads(function)
            outcome = Outcome(cloudpickle.dumps(call(*args, **kwargs)))
        except BaseException as error:
            data = b""
            with contextlib.suppress(Exception):  # of any kind: pickling runs the user's classes
                data = cloudpickle.dumps(error)
            server.send(Outcome(data, traceback.format_exc()))
            raise
        server.send(outcome)


if __name__ == "__main__":
    main(sys.argv[1])
