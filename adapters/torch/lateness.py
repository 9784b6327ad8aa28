# SPDX-License-Identifier: Apache-2.0
"""What is said of gradients that other ranks have not sent in time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from farandole.errors import StallError
from farandole.handles import explanation, is_under_way, stall

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient

__all__ = ["late"]

_MOST_NAMES = 4  # of gradients, in an error's text


def late(scope: str, sent: Iterable[Gradient], word: int | None, seconds: float) -> StallError:
    """The error of a step that took longer: what is missing of the gradients that it has sent, or
    of the closing word, by its core handle, and who has not sent it."""
    missing = [g for g in sent if g.handle is not None and is_under_way(g.handle)]
    names = ", ".join(g.name for g in missing[:_MOST_NAMES])
    if len(missing) > _MOST_NAMES:
        names += f" and {len(missing) - _MOST_NAMES} more"
    what = f"gradients of {names}" if missing else "all ranks' step()"
    handles = [g.handle for g in missing] or [word]
    why = explanation([handle for handle in handles if handle is not None])
    return stall(f"{scope}: {what}", seconds, why)
