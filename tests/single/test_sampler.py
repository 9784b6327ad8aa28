# SPDX-License-Identifier: Apache-2.0
"""ElasticSampler: each sample counts once an epoch, however many ranks come and go in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole import topology
from farandole.torch.elastic import ElasticSampler


def samplers_of(
    ranks: int, samples: int, patch: pytest.MonkeyPatch, state: dict[str, int], even: bool
) -> list[ElasticSampler]:
    """Those of all ranks of a new world, which go on from this state."""
    found = []
    patch.setattr(topology, "is_initialized", lambda: True)
    patch.setattr(topology, "size", lambda: ranks)
    for rank in range(ranks):
        patch.setattr(topology, "rank", lambda rank=rank: rank)
        found.append(ElasticSampler(range(samples), seed=5, even=even))
        found[-1].load_state_dict(state)
    return found


@pytest.mark.parametrize("even", [False, True])
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 5),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4)), max_size=6),
    last=st.integers(1, 5),
)
def test_each_sample_once(
    even: bool, samples: int, batch: int, worlds: list[tuple[int, int, int]], last: int
) -> None:
    """`worlds`: ranks, the batches that they train, and the rank whose state the others get. The
    last world trains to the end."""
    seen: list[int] = []
    state = {"epoch": 3, "processed_num": 0}
    with pytest.MonkeyPatch.context() as patch:
        for ranks, rounds, heir in [*worlds, (last, samples, 0)]:
            samplers = samplers_of(ranks, samples, patch, state, even)
            parts = [list(sampler) for sampler in samplers]
            assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
            for i in range(rounds):
                for sampler, part in zip(samplers, parts, strict=True):
                    if mine := part[i * batch : (i + 1) * batch]:
                        seen += mine
                        sampler.record_batch(i, len(mine))
            # A rank whose only batch was short can't know whether the others' were longer, and one
            # that ends with a full batch not whether others have trained one more.
            part = parts[heir % ranks]
            more = len(part) % batch == 0 and len(part) < len(parts[0])
            unsure = not even and (len(parts[-1]) < batch or more)
            state = samplers[0 if unsure else heir % ranks].state_dict()
    assert set(seen) == set(range(samples))
    assert even or len(seen) == samples


def test_even_parts_are_as_horovods() -> None:
    with pytest.MonkeyPatch.context() as patch:
        state = {"epoch": 0, "processed_num": 0}
        even = samplers_of(4, 10, patch, state, True)
        uneven = samplers_of(4, 10, patch, state, False)
    assert [len(sampler) for sampler in even] == [3] * 4
    assert [len(sampler) for sampler in uneven] == [3, 3, 2, 2]
    assert (even[0].total_size, uneven[0].total_size) == (12, 10)


def test_batches_of_several_sizes() -> None:
    """Of a loader that makes them as it likes: what counts is how far a rank has come."""
    sizes = random.Random(2).choices(range(1, 4), k=9)
    with pytest.MonkeyPatch.context() as patch:
        samplers = samplers_of(2, 100, patch, {"epoch": 0, "processed_num": 0}, False)
        for i, size in enumerate(sizes):
            for sampler in samplers:
                sampler.record_batch(i, size)
    assert [sampler.processed_num for sampler in samplers] == [2 * sum(sizes)] * 2
