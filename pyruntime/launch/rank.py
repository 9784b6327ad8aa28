# SPDX-License-Identifier: Apache-2.0
"""The program of each rank of farandole.run(). Its argument is the address of the result server."""

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
    """Receives the function, calls it, and sends the result or exception.

    An exception is also raised here, so that the other ranks get a PeerError.
    """
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
            with contextlib.suppress(Exception):  # pickling runs code of the user's classes
                data = cloudpickle.dumps(error)
            server.send(Outcome(data, traceback.format_exc()).encode())
            raise
        server.send(outcome.encode())


if __name__ == "__main__":
    main(sys.argv[1])
