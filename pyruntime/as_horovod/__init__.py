# SPDX-License-Identifier: Apache-2.0
"""Runs scripts that say `import horovod.torch as hvd` without changing them. For example:

mpirun -np 4 python -m farandole.as_horovod train.py --epochs 3

The folder `path/` holds a package `horovod` that has Horovod's module names and farandole's calls.
The folder also holds the command `horovodrun`, which runs `farandole run`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = str(Path(__file__).with_name("path"))


def install() -> None:
    """Makes `import horovod` load farandole's package, in this process and in its child processes.
    Child processes also find the command `horovodrun`.

    Raises RuntimeError if the real Horovod has been imported.
    """
    module = sys.modules.get("horovod")
    if module is not None and not str(module.__file__).startswith(FOLDER):
        raise RuntimeError(f"Horovod itself has been imported already, from {module.__file__}")
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    os.environ["AS_HOROVOD_PYTHON"] = sys.executable
    for name, folder in {"PYTHONPATH": FOLDER, "PATH": str(Path(FOLDER, "bin"))}.items():
        inherited = os.environ.get(name, "")
        if folder not in inherited.split(os.pathsep):
            os.environ[name] = os.pathsep.join(filter(None, [folder, inherited]))
