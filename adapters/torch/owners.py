# SPDX-License-Identifier: Apache-2.0
"""Which optimizer reduces a parameter that several have: the newest, for all of them. Used by
Reducers; each on the thread that makes it or steps."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Reducer

_owners: WeakValueDictionary[int, Gradient] = WeakValueDictionary()  # by the parameter's id


def take(gradient: Gradient) -> None:
    """Lets this optimizer reduce the parameter from now on; the older one's hook goes."""
    older = _owners.get(id(gradient.parameter))
    if older is not None:
        older.reducer.give_up("another optimizer has taken its parameters")
        older.unhook()
        older.reducer.lent = True
    _owners[id(gradient.parameter)] = gradient


def foreign(gradient: Gradient) -> bool:
    """Whether another optimizer reduces it. Raises RuntimeError if that gives another result.

    One that no longer exists has given the parameter back.
    """
    owner = _owners.get(id(gradient.parameter))
    if owner is None:
        _owners[id(gradient.parameter)] = gradient
        if gradient.parameter.requires_grad:
            gradient.hook()
    if owner is None or owner is gradient:
        return False
    if gradient.encoding.grouped or _terms(owner.reducer) != _terms(gradient.reducer):
        raise RuntimeError(
            f"{gradient.name} belongs to a newer DistributedOptimizer, which reduces it in a "
            "different way: give both the same op, factors, process set and passes per "
            "step, without groups; or delete the older optimizer, if it is not in use"
        )
    return True


def _terms(reducer: Reducer) -> object:
    """What the value of a reduced gradient depends on."""
    s, passes = reducer.settings, reducer.passes
    return s.process_set, s.reduce_op, s.prescale, s.postscale, passes.wanted


def give_back(gradient: Gradient) -> None:
    """Ends its hook, and its part in the parameter, if that is its own."""
    gradient.unhook()
    if _owners.get(id(gradient.parameter)) is gradient:
        del _owners[id(gradient.parameter)]


def reduce_elsewhere(reducer: Reducer, timeout: float | None) -> None:
    """Reduces what newer optimizers reduce for this one, before it steps; collective."""
    reducer.lent = False  # two may reduce for each other
    try:
        others = {_owners.get(id(g.parameter), g).reducer: None for g in reducer.gradients}
        for other in others:
            if other is not reducer:
                other.synchronize(timeout, at_step=True)
    finally:
        reducer.lent = True
