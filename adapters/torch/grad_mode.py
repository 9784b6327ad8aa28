# SPDX-License-Identifier: Apache-2.0
"""Functions that change tensors without recording it for autograd. For all of farandole.torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_enable: Callable[[bool], None] = torch._C._set_grad_enabled


def without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function to run without gradients. It takes a tenth of torch.no_grad()'s time,
    whose `__enter__` and `__exit__` are Python code that also looks at torch.jit."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        try:
            _enable(False)
            return function(*args, **kwargs)
        finally:
            _enable(before)

    return call


@without_grad
def write(results: Sequence[Tensor], act: Callable[[], object]) -> None:
    """Calls `act()`, which writes to these tensors, in any thread: some may have been made in
    inference mode. Torch's own context is entered and left by C++ code, as above."""
    if any(x.is_inference() for x in results):
        with torch._C._InferenceMode(True):
            act()
    else:
        act()
