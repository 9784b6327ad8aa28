# SPDX-License-Identifier: Apache-2.0
"""Settles gradients that need nothing but their result, all together. For the Reducer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from farandole.torch.gradients.gradient import Gradient

_wire, _parameter = attrgetter("wire"), attrgetter("parameter")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_set_grad: Any = _base.grad.__set__


def settle_plain(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Settles those that are `plain`, quickly; returns the others. None may have been reset."""
    plain = [gradient for gradient in gradients if gradient.plain]
    wires = [*map(_wire, plain)]
    try:
        deque(map(_set_grad, map(_parameter, plain), wires), 0)
    except RuntimeError:  # a parameter's form has changed: `model.half()`, `p.data = x`
        return [*gradients]
    for gradient, wire in zip(plain, wires, strict=True):
        gradient.deliver(wire)
        gradient.plain = False
        gradient.handle = gradient.wire = gradient.unsent = None
    return [gradient for gradient in gradients if gradient.handle is not None]
