# SPDX-License-Identifier: Apache-2.0
"""Which optimizers of this process have rounds open, and which of them reduces a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from farandole.calls import requests

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient
    from farandole.torch.reducer import Reducer

__all__ = ["adopt", "ended", "opened", "others"]

_open: dict[Reducer, None] = {}  # for any thread
_owners: WeakValueDictionary[int, Gradient] = WeakValueDictionary()  # by the parameter's id


def adopt(gradient: Gradient) -> None:
    """The newest optimizer reduces a parameter: two at once would spoil each other's memory."""
    older = _owners.get(id(gradient.parameter))
    if older is not None:
        if older.reducer.round.open:
            older.reducer.synchronize()
        gradient.delivered = older.delivered
        older.unhook()
    _owners[id(gradient.parameter)] = gradient


def opened(reducer: Reducer) -> None:
    """Its round has begun."""
    _open[reducer] = None


def ended(reducer: Reducer) -> None:
    """Its round is over."""
    _open.pop(reducer, None)


def others(reducer: Reducer, thread: int) -> list[Reducer]:
    """Those with open rounds, but for those that another thread steps.

    A step closes them, lest two ranks that step in different orders wait for each other.
    """
    return [x for x in list(_open) if x is not reducer and x.thread in (None, thread)]


def _abandon_all() -> None:
    for reducer in list(_open):
        reducer.abandon()


requests.on_restart(_abandon_all)  # what was under way has ended with the runtime
