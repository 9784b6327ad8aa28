# SPDX-License-Identifier: Apache-2.0
"""The closing word: what ranks tell each other once per optimizer step, in 72 bytes."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from farandole.buffers import DTYPES, Buffer
from farandole.errors import MismatchError
from farandole.handles import is_absent, release, wait_until
from farandole.ops import Max
from farandole.requests import Call, Op, PreparedTensor

__all__ = ["ClosingWord", "Statement"]

_INT64 = DTYPES.index("int64")


class Statement(NamedTuple):
    """One rank's view of its window when it closes it; over the ranks, the largest values."""

    late: int  # gradients that arrived after their reduction had begun
    dropped: int  # 1: this rank drops the gradients, it does not use them
    sparse: int  # a gradient that is sparse, contrary to expectation: see Reducer.close; 0: none
    steps: int  # step() calls before
    tensors: int  # sent in the window
    carried: int  # gradients sent in a dropped window that belong to the next one


class ClosingWord:
    """An allreduce (Max) of a Statement; equal fields are checked by sending them negated too."""

    def __init__(self, scope: str, process_set: int) -> None:
        """`scope` is the optimizer's name, `process_set` its set's number."""
        self._scope = scope
        self._memory = array("q", bytes(72))
        self._address = self._memory.buffer_info()[0]
        call = Call(Op.ALLREDUCE, f"{scope}.closing", process_set, Max)
        self._tensor = PreparedTensor(call, Buffer(self._address, _INT64, (9,), self._memory))
        self._handle: int | None = None

    def send(self, statement: Statement) -> None:
        """Says the word; does not wait."""
        late, dropped, sparse, *equal = statement
        self._memory[:] = array("q", [late, dropped, sparse, *equal, *(-x for x in equal)])
        self._handle = self._tensor.submit(self._address, self._address)

    @property
    def under_way(self) -> list[int]:
        """Its core handle, until it has been waited for."""
        return [] if self._handle is None else [self._handle]

    def wait(self, keep: bool, deadline: float | None = None) -> Statement | None:
        """What all said, also once more; None: `deadline` (time.monotonic()) has passed.

        `keep`: this rank uses the window's gradients, so no other may have dropped them. Raises
        MismatchError where ranks were not in the same window.
        """
        if self._handle is not None:
            if not wait_until([self._handle], deadline):
                return None
            assert not is_absent(self._handle)
            release([self._handle])
            self._handle = None
        late, dropped, sparse, *largest = self._memory
        said = Statement(late, dropped, sparse, *largest[:3])
        for field, high, low in zip(said._fields[3:], said[3:], largest[3:], strict=True):
            if high != -low:
                raise MismatchError(
                    f"{self._scope}: ranks are not in the same optimizer step: {field} is "
                    f"{-low} on one rank, {high} on another; do all ranks call step() and "
                    "zero_grad() equally often, and freeze or add the same parameters?"
                )
        if dropped and keep:
            raise MismatchError(
                f"{self._scope}: this rank uses gradients that another rank has dropped by "
                "zero_grad(): all ranks must do the same"
            )
        return said
