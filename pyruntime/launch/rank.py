# SPDX-License-Identifier: Apache-2.0
"""What farandole.run() starts on each rank: `python -m farandole.launch.rank ADDRESS`."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from farandole.launch.home import KEY, Outcome, pickled, visit
from farandole.start import bootstrap

__all__ = ["main"]


def main(address: str) -> None:
    """Fetches the function, calls it, sends what it returns or raises. Raises it here too, so that
    the other ranks hear of it as of any failing rank."""
    with visit(address, os.environ.pop(KEY)) as home:
        home.send(bootstrap.launched_rank())
        work = home.recv_bytes()
        try:
            search_path, function = pickle.loads(work)
            sys.path[:] = [*search_path, *(x for x in sys.path if x not in search_path)]
            call, args, kwargs = pickle.loads(function)
            outcome = Outcome(pickled(call(*args, **kwargs)))
        except BaseException as error:
            home.send(Outcome(_pickled_or_none(error), traceback.format_exc()))
            raise
        home.send(outcome)


def _pickled_or_none(error: BaseException) -> bytes:
    try:
        return pickled(error)
    except Exception:  # of any kind: the classes in it are the user's
        return b""


if __name__ == "__main__":
    main(sys.argv[1])
