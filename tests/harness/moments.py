# SPDX-License-Identifier: Apache-2.0
"""The moments at which Python may run a signal handler or, since 3.12, the garbage collector."""

from __future__ import annotations

import itertools
import opcode
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

# Python looks for signals at the end of these instructions.
_NAMES = ("CALL", "RESUME", "JUMP_BACKWARD")
_LOOKS = {code for name, code in opcode.opmap.items() if name.startswith(_NAMES)}


def at_each_moment(program: Callable[[], object], handler: Callable[[], object]) -> int:
    """Runs `program` repeatedly, and calls `handler` once in each run, on the same thread.

    Each run calls it one moment later in farandole's code. Returns the number of these moments.
    """
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 traces no instructions
    for moment in itertools.count(1):
        left = [moment]
        sys.settrace(partial(_traced, handler, left))
        try:
            program()
        finally:
            sys.settrace(None)
        if left[0] > 0:
            return moment - 1
    raise AssertionError


def _traced(handler: Callable[[], object], left: list[int], frame: FrameType, *_: object) -> Any:
    if not frame.f_globals.get("__name__", "").startswith("farandole"):
        return None
    frame.f_trace_opcodes = True
    code, looked = frame.f_code.co_code, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal looked
        if event == "opcode":
            left[0] -= looked
            if looked and left[0] == 0:
                handler()
            looked = code[frame.f_lasti] in _LOOKS
        return trace

    return trace
