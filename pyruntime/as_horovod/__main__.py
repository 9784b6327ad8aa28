# SPDX-License-Identifier: Apache-2.0
"""Implements the command python -m farandole.as_horovod (script.py | -m module) arguments..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from farandole.as_horovod import install

USAGE = "usage: python -m farandole.as_horovod (script.py | -m module) [arguments...]"


def main() -> None:
    """Runs a script or module just as Python itself would, with the same exit code and errors."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or (arguments[0].startswith("-") and not as_module):
        sys.exit(USAGE)
    target = arguments[0]
    if not as_module:
        if not Path(target).is_file():
            sys.exit(f"python -m farandole.as_horovod: there is no file {target}")
        if not getattr(sys.flags, "safe_path", False):  # as Python does for a script
            sys.path[0] = str(Path(target).resolve().parent)
    install()
    sys.argv[:] = arguments
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
