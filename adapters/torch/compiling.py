# SPDX-License-Identifier: Apache-2.0
"""Prevents torch.compile from tracing into farandole's code.

Used by optimizer.py and by farandole's process groups for torch.distributed.
"""

from __future__ import annotations

import sys

# In a source tree, each of these packages is a separate folder.
_OURS = ("farandole", "farandole.torch", "farandole.c10d")
_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")  # torch 2.1 has the latter
_done = False


def stay_outside() -> None:
    """Excludes farandole's files from tracing. Functions that these files call are still compiled.

    If farandole's code were traced, a step would run twice, and the first run would already reduce
    gradients. Tracing a process group's call would fail. This function does nothing until torch's
    optimizers or DDP have imported the compiler.
    """
    global _done
    if _done:
        return
    for rules in filter(None, map(sys.modules.get, _RULES)):
        for name in _OURS:
            rules.add(name)
        _done = True
