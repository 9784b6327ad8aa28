# SPDX-License-Identifier: Apache-2.0
"""Which ranks have joined, in every way that a test of few ranks has time for."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import farandole


def in_turns(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test of `active`, the ranks that have not joined; the others wait in join().

    Each rank in turn has joined, and each two. A rank whose part fails joins too, so that the
    others do not wait for it.
    """

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        failures = []
        everyone = range(farandole.size())
        for gone in [*itertools.combinations(everyone, 1), *itertools.combinations(everyone, 2)]:
            active = [rank for rank in everyone if rank not in gone]
            try:
                if farandole.rank() in active:
                    test(active=active, **arguments)
            except Exception as reason:
                failures.append(reason)
            assert farandole.join() in everyone
        if failures:
            raise failures[0]

    given = inspect.signature(test)
    others = [each for name, each in given.parameters.items() if name != "active"]
    run.__signature__ = given.replace(parameters=others)  # type: ignore[attr-defined]
    return run
