# SPDX-License-Identifier: Apache-2.0
"""The gradients of GPT-2 small: 148 tensors, 124,439,808 float32."""

from __future__ import annotations

from collections.abc import Iterator

from resnet50 import Shape

COUNT, ELEMENTS = 148, 124_439_808
_WORDS, _PLACES, _WIDTH, _LAYERS = 50257, 1024, 768, 12


def shapes() -> list[Shape]:
    """Parameters in the order of the forward pass (Radford et al., 2019); the head shares
    weights."""
    found = list(_gpt2())
    assert len(found) == COUNT
    assert sum(rows * (columns[0] if columns else 1) for rows, *columns in found) == ELEMENTS
    return found


def _gpt2() -> Iterator[Shape]:
    yield from ((_WORDS, _WIDTH), (_PLACES, _WIDTH))
    for _ in range(_LAYERS):
        yield from _normalisation()
        yield from _linear(_WIDTH, 3 * _WIDTH)
        yield from _linear(_WIDTH, _WIDTH)
        yield from _normalisation()
        yield from _linear(_WIDTH, 4 * _WIDTH)
        yield from _linear(4 * _WIDTH, _WIDTH)
    yield from _normalisation()


def _normalisation() -> Iterator[Shape]:
    yield from ((_WIDTH,), (_WIDTH,))


def _linear(inputs: int, outputs: int) -> Iterator[Shape]:
    yield from ((inputs, outputs), (outputs,))
