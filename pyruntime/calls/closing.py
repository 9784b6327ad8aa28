# SPDX-License-Identifier: Apache-2.0
"""The closing word: what ranks tell each other once per optimizer step, in 104 bytes."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from farandole.arrays.buffers import DTYPES, Buffer
from farandole.calls import leases
from farandole.calls.arguments import ReduceOp
from farandole.calls.requests import Call, Op, PreparedTensor, refuse
from farandole.errors import MismatchError

__all__ = ["ClosingWord", "Statement"]

_INT64 = DTYPES.index("int64")


class Statement(NamedTuple):
    """One rank's view of its round when it closes it; over the ranks, the largest values."""

    late: int  # gradients that arrived after their reduction had begun
    dropped: int  # 1: this rank drops the gradients, it does not use them
    sparse: int  # a gradient that is sparse, contrary to expectation: see Reducer.close; 0: none
    # Equal on all ranks:
    steps: int  # step() calls before, since the last join()
    tensors: int  # sent in the round
    carried: int  # gradients sent in a dropped round that belong to the next one
    divisors: int  # what gradients were divided by, where the round adds to an earlier one
    reset: int  # which gradients the user has reset since they were sent; 0: none


_LARGEST = 3  # fields that are the largest of all; the others are equal
_REMEDIES = {
    "steps": "do all ranks call step() and zero_grad() equally often?",
    "tensors": "do all ranks freeze or add the same parameters?",
    "carried": "do all ranks reset the same gradients?",
    "reset": "reset gradients on all ranks alike, between backward() and step(), too",
    "divisors": "with accumulate='mean' all ranks make equally many backward passes in a step that "
    "has more than backward_passes_per_step",
}


class ClosingWord:
    """An allreduce (Max) of a Statement; equal fields are checked by sending them negated too."""

    def __init__(self, scope: str, process_set: int) -> None:
        """`scope` is the optimizer's name, `process_set` its set's number."""
        self._scope = scope
        self._words = array("q")
        count = 2 * len(Statement._fields) - _LARGEST
        self._call = call = Call(Op.ALLREDUCE, f"{scope}.closing", process_set, ReduceOp.MAX)
        self._tensor = PreparedTensor(call, Buffer(0, _INT64, (count,), None))
        self.handle: int | None = None  # of the core, until it has been waited for

    def send(self, statement: Statement) -> None:
        """Says the word; does not wait."""
        self._words = words = array("q", [*statement, *(-x for x in statement[_LARGEST:])])
        address = words.buffer_info()[0]
        self.handle = self._tensor.submit(address, address, words)

    def refuse(self, reason: Exception) -> None:
        """Tells the peers that this rank will not say it, and why."""
        refuse(self._call, reason)

    def said(self, keep: bool) -> Statement:
        """What all said, once the handle is done; more than once if need be.

        `keep`: this rank uses the round's gradients, so no other may have dropped them. Raises
        MismatchError where ranks were not in the same round.
        """
        handle, self.handle = self.handle, None
        if handle is not None:
            leases.end([handle])
        count = len(Statement._fields)
        said = Statement(*self._words[:count])
        fields = zip(
            Statement._fields[_LARGEST:], said[_LARGEST:], self._words[count:], strict=True
        )
        for field, high, low in fields:
            if high != -low:
                raise MismatchError(
                    f"{self._scope}: ranks are not in the same optimizer step: {field} is "
                    f"{-low} on one rank, {high} on another; {_REMEDIES[field]}"
                )
        if said.dropped and keep:
            raise MismatchError(
                f"{self._scope}: this rank uses gradients that another rank has dropped by "
                "zero_grad(): all ranks must do the same"
            )
        return said
