# SPDX-License-Identifier: Apache-2.0
"""Which Reducers of this process have open rounds, and which of them reduces a parameter. For
Reducers, on any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from farandole.calls import requests

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Reducer

_open: dict[Reducer, None] = {}  # for any thread
_owners: WeakValueDictionary[int, Gradient] = WeakValueDictionary()  # by the parameter's id


def adopt(gradient: Gradient) -> None:
    """Lets the newest optimizer reduce a parameter; two would overwrite each other's memory."""
    older = _owners.get(id(gradient.parameter))
    if older is not None:
        if older.reducer.round.open:
            older.reducer.synchronize()
        gradient.delivered = older.delivered
        older.unhook()
    _owners[id(gradient.parameter)] = gradient


def opened(reducer: Reducer) -> None:
    """Notes that a round has begun."""
    _open[reducer] = None


def ended(reducer: Reducer) -> None:
    """Notes that a round has ended."""
    _open.pop(reducer, None)


def others(reducer: Reducer, thread: int) -> list[Reducer]:
    """Other reducers with open rounds, except those that another thread steps.

    A step closes them too, or two ranks that step in different orders would wait for each other.
    """
    return [x for x in list(_open) if x is not reducer and x.thread in (None, thread)]


def _abandon_all() -> None:
    for reducer in list(_open):
        reducer.abandon()


requests.on_restart(_abandon_all)  # what was under way has ended with the runtime
