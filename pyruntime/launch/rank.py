# SPDX-License-Identifier: Apache-2.0
"""farandole.run() starts this on each rank, with the address of its server as the argument."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback

import cloudpickle

from farandole.launch.result_server import KEY, Outcome
from farandole.start import launchers
from farandole.start.connection import open_connection


def main(address: str) -> None:
    """Fetches the function, calls it, sends its result or exception. Raises the exception too, so
    that the other ranks fail as with any failing rank."""
    key = bytes.fromhex(os.environ.pop(KEY))
    with open_connection(address, key, launchers.launched_rank()) as server:
        work = server.receive()
        try:
            search_path, function = pickle.loads(work)
            sys.path[:] = [*search_path, *(x for x in sys.path if x not in search_path)]
            call, args, kwargs = pickle.loads(function)
            outcome = Outcome(cloudpickle.dumps(call(*args, **kwargs)))
        except BaseException as error:
            data = b""
            with contextlib.suppress(Exception):  # of any kind: pickling runs the user's classes
                data = cloudpickle.dumps(error)
            server.send(Outcome(data, traceback.format_exc()).encode())
            raise
        server.send(outcome.encode())


if __name__ == "__main__":
    main(sys.argv[1])
