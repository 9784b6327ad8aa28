# SPDX-License-Identifier: Apache-2.0
"""How calls of several ranks' flight recorders are matched."""

from __future__ import annotations

from typing import Any

from farandole.observe.flight import matched_calls


def page(rank: int, submitted: int, position: int = 0, negotiated: int = 0) -> dict[str, Any]:
    """A rank with one open call of 'x'; its clock began `rank` seconds later than rank 0's."""
    call = {"call": 1, "name": "x", "op": "allreduce", "set": 0, "dtype": "float32", "bytes": 4}
    call |= {"t": submitted - rank, "seq": 0, "shape": [1], "position": position}
    call |= {"negotiated": negotiated - rank, "agreed_bucket": 0, "lane": 0}
    head = {"rank": rank, "size": 3, "sets": {}, "epoch_minus_monotonic_ns": rank}
    return {**head, "recorded": 0, "events": [], "open": [call]}


def test_ranks_that_have_not_read_of_an_agreement_have_made_it() -> None:
    pages = [page(0, submitted=100, position=5, negotiated=200)]
    pages += [page(1, submitted=150), page(2, submitted=199)]
    [shared] = matched_calls(pages)
    assert sorted(shared.calls) == [0, 1, 2]
    assert shared.negotiated
    assert shared.first.rank == 0


def test_a_call_after_the_agreement_is_the_next_of_its_name() -> None:
    agreed, waits = matched_calls([page(0, 100, position=5, negotiated=200), page(1, 201)])
    assert (sorted(agreed.calls), agreed.negotiated) == ([0], True)
    assert (sorted(waits.calls), waits.negotiated) == ([1], False)
