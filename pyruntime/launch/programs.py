# SPDX-License-Identifier: Apache-2.0
"""Command lines for farandole's helper processes, and for leaders of process groups.

Launchers and agents use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# With -m and -c, Python first searches the working folder, where another user may have put a
# package with the same name. The option -P prevents this, but needs Python 3.11.
_OWN = (
    "import sys; sys.path[0] or sys.path.pop(0); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
# Used instead of preexec_fn, which may deadlock after fork() if other threads run.
_APART = """
import os, signal, sys
parent, *command = sys.argv[1:]
os.setpgid(0, 0)
if int(parent):
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it has died meanwhile
        os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(command[0], command)
except OSError as reason:
    sys.stderr.write(f"farandole: {command[0]} can't be started: {reason.strerror}\\n")
    sys.exit(127)
"""


def own(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Returns a command that runs a helper module as `python -m` does.

    Unlike `python -m`, it does not import anything from the working folder.
    """
    return [python, "-c", _OWN, module, *arguments]


def apart(command: Sequence[str], dies: bool = False) -> list[str]:
    """Returns a command that runs `command` as the leader of a new process group.

    Ctrl-C and timeout(1) do not reach that group. If `dies` is True, the kernel kills the process
    when the thread that has started it ends.
    """
    parent = os.getpid() if dies else 0
    return [sys.executable, "-I", "-S", "-c", _APART, str(parent), *command]
