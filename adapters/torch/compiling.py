# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile from tracing into farandole's code. Used by optimizer.py and by the groups of
torch.distributed."""

from __future__ import annotations

import sys

# In a source tree these are separate folders.
_OURS = ("farandole", "farandole.torch", "farandole.c10d")
_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")  # the latter in torch 2.1
_done = False


def stay_outside() -> None:
    """Excludes farandole's files from tracing. Functions called from them are compiled as usual.

    Tracing runs a step twice, and the first run would reduce gradients. Tracing a group's call
    would fail. Does nothing before the compiler's import, by every torch optimizer and DDP.
    """
    global _done
    if _done:
        return
    for rules in filter(None, map(sys.modules.get, _RULES)):
        for name in _OURS:
            rules.add(name)
        _done = True
