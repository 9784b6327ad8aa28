# SPDX-License-Identifier: Apache-2.0
"""What packages built on farandole use in addition to its public names: how an error of one rank
reaches all, how objects live through shutdown() and init(), calls by the core's handles. Those in
extras/ use nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from farandole.calls import leases
from farandole.calls.arguments import Argument, check, integer, is_factor
from farandole.calls.handles import done_within, is_absent
from farandole.calls.public_call import collective_then, heard_by_all
from farandole.calls.requests import (
    Call,
    Op,
    Scope,
    generation,
    on_leave,
    refuse,
    refuse_all,
    submit,
)
from farandole.config import setting
from farandole.errors import ranks_text
from farandole.members import members_of, set_id

__all__ = ["Argument", "Call", "Op", "Scope", "check"]
__all__ += ["collective_then", "done_within", "generation"]
__all__ += ["heard_by_all", "integer", "is_factor", "on_leave", "ranks_text"]
__all__ += ["refuse", "refuse_all", "set_id", "setting"]
__all__ += ["is_absent", "leases", "members_of", "submit"]


def late(module: str, extras: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that are imported when they are used: those of extras, by
    the extra's name."""
    homes = {name: extra for extra, names in extras.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"farandole.extras.{homes[name]}"), name)

    return get
