# SPDX-License-Identifier: Apache-2.0
"""A rank that runs scripts of calls (see plan) and says what it got."""

from __future__ import annotations

import gc
import time
from typing import Any

import farandole as fd
from strangers.arrays import bare, changed, make, refill, spoil
from strangers.memory import Canaries
from strangers.plan import Call, Plan
from strangers.stage import TIMEOUT, Stage
from strangers.submission import block, submit

__all__ = ["CallRunner", "calibrate"]

_of_a_join = 0  # how many calls metrics() shows under way for ever after a join()


def calibrate() -> None:
    """Finds out what metrics() makes of a join(). Collective, where nothing is under way."""
    global _of_a_join
    fd.join()
    fd.barrier()
    end = time.monotonic() + 0.5
    while _under_way() and time.monotonic() < end:
        time.sleep(0.001)
    _of_a_join = _under_way()


def _under_way() -> int:
    seen = fd.metrics()
    return seen["tensors_submitted"] - seen["tensors_done"] - seen["tensors_failed"]


class Mistake(Exception):
    """Of the user's own code."""


class CallRunner:
    """One program on one rank."""

    def __init__(self, plan: Plan, rank: int, stage: Stage) -> None:
        self._plan = plan
        self._rank = rank
        self._stage = stage
        self._sets: list[Any] = [fd.global_process_set]
        self._handles: dict[int, tuple[Any, list[Any]]] = {}  # that are to be waited for
        self._arrays: dict[int, list[Any]] = {}  # by tensor: those that come again
        self._left: list[tuple[int, list[Any]]] = []  # in place, handle dropped: seen when quiet
        self._canaries = Canaries()
        self._joins = 0  # since init()
        self.found: list[tuple[Any, ...]] = []  # ("value", call, arrays) or ("wrong", text)

    def run(self) -> None:
        """The whole script."""
        self._add_sets()
        for place, (word, *arguments) in enumerate(self._plan.scripts[self._rank]):
            self._stage.now(f"{place} {word} {arguments}")
            getattr(self, f"_{word}")(*arguments)
        self._look()

    def after_shutdown(self) -> None:
        """Nothing may have been written by then either."""
        self._look()

    # ---- instructions

    def _call(self, number: int, tensor: int, group: int, fate: str, again: bool) -> None:
        call, process_set = self._plan.calls[number], self._sets[group]
        members = list(call.members)
        if again and tensor in self._arrays:
            arrays = self._arrays[tensor]
            refill(call, arrays, self._rank, members)
        else:
            arrays = make(call, self._rank, members)
        self._arrays.pop(tensor, None)
        if call.tensor.keep and fate in ("wait", "blocking", "poll", "later"):
            self._arrays[tensor] = arrays
        if fate == "fails":
            self._fails(call, process_set, arrays)
        elif fate.startswith("blocking"):
            self._blocking(call, process_set, arrays, fate)
        elif fate == "raise":
            try:
                self._careless(call, process_set, arrays)
            except Mistake:
                self._leave(call, arrays)
        else:
            self._take(call, submit(call, self._rank, process_set, arrays), arrays, fate)

    def _careless(self, call: Call, process_set: Any, arrays: list[Any]) -> None:
        handle = submit(call, self._rank, process_set, arrays)
        raise Mistake(f"before {handle!r} was waited for")

    def _take(self, call: Call, handle: Any, arrays: list[Any], fate: str) -> None:
        if fate == "later":
            self._handles[call.number] = handle, arrays
        elif fate == "drop":
            self._leave(call, arrays)
        elif fate == "forget":
            pass
        elif fate == "poll":
            with self._stage.blocked():
                while not handle.poll():
                    pass
            self._finish(call, handle, arrays)
        elif fate.startswith("timeout"):
            try:
                self._value(call, handle.wait(timeout=TIMEOUT), arrays)
            except fd.StallError:
                self._again(call, handle, arrays, fate)
        elif fate == "free":
            arrays.clear()
            gc.collect()
            self._finish(call, handle, None)
        elif fate == "data":
            seen = spoil(arrays)
            self._finish(call, handle, arrays if seen else None)
        else:
            self._finish(call, handle, arrays)

    def _again(self, call: Call, handle: Any, arrays: list[Any], fate: str) -> None:
        if fate.endswith("again"):
            self._finish(call, handle, arrays)
        else:
            self._leave(call, arrays)

    def _leave(self, call: Call, arrays: list[Any]) -> None:
        if call.tensor.in_place:
            self._left.append((call.number, arrays))

    def _blocking(self, call: Call, process_set: Any, arrays: list[Any], fate: str) -> None:
        try:
            if fate == "blocking_timeout":
                result = block(call, self._rank, process_set, arrays, TIMEOUT)
            else:
                with self._stage.blocked():
                    result = block(call, self._rank, process_set, arrays)
        except fd.StallError:
            if fate == "blocking":
                raise
            self._leave(call, arrays)
        else:
            self._value(call, result, arrays)

    def _fails(self, call: Call, process_set: Any, arrays: list[Any]) -> None:
        assert call.odd is not None
        odd, what = call.odd
        try:
            with self._stage.blocked():
                submit(call, self._rank, process_set, arrays, odd=odd == self._rank).wait()
        except fd.StallError as error:
            self._wrong(
                f"call {call.number}: {what} on rank {odd} leaves this rank waiting: {error}"
            )
        except (fd.MismatchError, ValueError, TypeError):
            pass
        except fd.PeerError as error:  # the odd rank has heard of it, and its program is over
            if "finished normally and left" not in str(error):
                raise
        else:
            self._wrong(f"call {call.number}: {what} on rank {odd} went unnoticed")

    def _wait(self, number: int) -> None:
        handle, arrays = self._handles.pop(number)
        self._finish(self._plan.calls[number], handle, arrays)

    def _finish(self, call: Call, handle: Any, arrays: list[Any] | None) -> None:
        with self._stage.blocked():
            result = handle.wait()
        self._value(call, result, arrays)

    def _memory(self, tensor: int, count: int, keep: bool) -> None:
        t = self._plan.tensors[tensor]
        self._canaries.add(t, self._rank, count, keep, f"for tensor {tensor}")

    def _late(self) -> None:
        self._stage.come_last()

    def _collect(self) -> None:
        gc.collect()

    def _quiet(self) -> None:
        with self._stage.blocked():
            while _under_way() > self._joins * _of_a_join:
                time.sleep(0.0002)  # no handle is left that would tell
        self._look()

    def _barrier(self, group: int) -> None:
        with self._stage.blocked():
            fd.barrier(self._sets[group])

    def _join(self, group: int) -> None:
        with self._stage.blocked():
            last = fd.join(process_set=self._sets[group])
        self._joins += 1
        members = self._plan.sets[group - 1] if group else range(len(self._plan.scripts))
        if last not in members:
            self._wrong(f"join() of ranks {list(members)} says that rank {last} was the last")

    def _add_sets(self) -> None:
        with self._stage.blocked():
            self._sets[1:] = [fd.add_process_set(list(one)) for one in self._plan.sets]

    def _sets_again(self) -> None:
        with self._stage.blocked():
            for one in self._sets[1:]:
                if not fd.remove_process_set(one):
                    self._wrong(f"{one} could not be removed")
        self._add_sets()

    def _restart(self) -> None:
        with self._stage.blocked():
            fd.shutdown()
            self._look()
            fd.init()
        self._joins = 0
        self._add_sets()

    # ---- what is seen

    def _value(self, call: Call, result: Any, arrays: list[Any] | None) -> None:
        """`arrays` None: the program freed or replaced them, so results that are these arrays prove
        nothing."""
        t = call.tensor
        if arrays is None:
            if t.in_place:
                return
        elif t.in_place:
            results = result if t.count > 1 else [result]
            if any(y is not x for x, y in zip(arrays, results, strict=True)):
                self._wrong(f"call {call.number}, in place, gives other objects than it got")
        elif text := changed(call, arrays, self._rank):
            self._wrong(f"call {call.number} has changed its input: {text}")
        self.found.append(("value", call.number, bare(result)))

    def _look(self) -> None:
        for number, arrays in self._left:
            self.found.append(("value", number, bare(arrays)))
        self._left.clear()
        for text in self._canaries.changed():
            self._wrong(text)

    def _wrong(self, text: str) -> None:
        self.found.append(("wrong", text))
