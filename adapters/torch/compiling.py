# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile from tracing into farandole's code. Used by optimizer.py."""

from __future__ import annotations

import functools
import sys

_OURS = ("farandole", "farandole.torch")
_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")  # the latter in torch 2.1


@functools.cache
def stay_outside() -> None:
    """Excludes farandole's files from tracing. Functions called from them are compiled as usual.

    Tracing runs a step twice, and the first run would reduce gradients. This function need not
    import the compiler, because every torch optimizer has done so.
    """
    for rules in filter(None, map(sys.modules.get, _RULES)):
        for name in _OURS:
            rules.add(name)
