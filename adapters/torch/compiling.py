# SPDX-License-Identifier: Apache-2.0
"""What torch.compile makes of our code: calls, and no more."""

from __future__ import annotations

import functools
import sys

__all__ = ["stay_outside"]

_OURS = ("farandole", "farandole.torch")
_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")  # the latter in torch 2.1


@functools.cache
def stay_outside() -> None:
    """Keeps torch.compile from tracing into files of ours; what they call is compiled as ever.

    To trace a step is to run it twice, and the first time gradients are reduced. Any optimizer of
    torch's has imported the compiler already.
    """
    for rules in filter(None, map(sys.modules.get, _RULES)):
        for name in _OURS:
            rules.add(name)
