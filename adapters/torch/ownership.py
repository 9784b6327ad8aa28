# SPDX-License-Identifier: Apache-2.0
"""Which optimizers of this process have windows open, and which of them reduces a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from farandole import requests

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient
    from farandole.torch.reducer import Reducer

__all__ = ["adopt", "ended", "opened", "others"]

_open: WeakSet[Reducer] = WeakSet()
_owners: WeakValueDictionary[int, Gradient] = WeakValueDictionary()  # by the parameter's id


def adopt(gradient: Gradient) -> None:
    """The newest optimizer reduces a parameter: two at once would spoil each other's memory."""
    older = _owners.get(id(gradient.parameter))
    if older is not None:
        older.unhook()
    _owners[id(gradient.parameter)] = gradient


def opened(reducer: Reducer) -> None:
    """Its window has begun."""
    _open.add(reducer)


def ended(reducer: Reducer) -> None:
    """Its window is over."""
    _open.discard(reducer)


def others(reducer: Reducer) -> list[Reducer]:
    """Those with open windows. A step of any of them closes all, lest two ranks that step their
    optimizers in different orders wait for each other."""
    return [other for other in _open if other is not reducer]


def _abandon_all() -> None:
    for reducer in list(_open):
        reducer.abandon()


requests.on_restart(_abandon_all)  # what was under way has ended with the runtime
