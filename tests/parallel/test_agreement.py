# SPDX-License-Identifier: Apache-2.0
"""same_on_all_ranks() names rank, path and both values of what differs, on all ranks."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from farandole.errors import ranks_text
from harness.ranks import last


@dataclasses.dataclass
class Batch:
    tokens: Any
    labels: list[str]


class Plain:
    """Its repr holds an address."""


def is_last() -> bool:
    return fd.rank() == last()


def differs(value: Any, *texts: str) -> None:
    if fd.size() == 1:
        assert fd.same_on_all_ranks(value, name="it") is value
        return
    with pytest.raises(fd.MismatchError) as caught:
        fd.same_on_all_ranks(value, name="it")
    text = str(caught.value)
    assert text.startswith("'it' differs between ranks: "), text
    for one in texts:
        assert one in text, text
    assert f"on rank {last()}" in text
    assert f"on {ranks_text(range(last()))}" in text


def test_equal_values_are_returned() -> None:
    for value in (
        {"x": np.arange(5), "y": [torch.ones(3, dtype=torch.bfloat16), None, {"a", "b", "c"}]},
        Batch(torch.eye(2).to_sparse(), ["one"]),
        Plain(),
        torch.nn.Linear(2, 1, bias=False).apply(lambda m: m.weight.data.fill_(1.0)),
        np.array(["text", None], object),
        [],
        "x" * 3000,
    ):
        assert fd.same_on_all_ranks(value) is value


def test_a_function_is_refused_on_all_ranks() -> None:
    with pytest.raises(TypeError, match="pass the function's arguments"):
        fd.same_on_all_ranks(differs if is_last() else 1)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_arrays_differ_in_one_element(kind: Any) -> None:
    array = np.arange(1000.0)
    array[3] += 1 if is_last() else 0
    differs(
        {"a": 1, "b": [kind(array)]}, "value['b'][0]", "3.0, 4.0, 5.0", "4.0, 4.0, 5.0", "(1000,)"
    )


def test_arrays_differ_where_no_text_shows_it() -> None:
    array = np.zeros(1000, np.float32)
    array[777] = is_last()
    differs(array, "float32(1000,)")
    differs(torch.zeros(2, dtype=torch.float64 if is_last() else torch.float32), "torch.float64")


def test_the_rest_differs_in_its_repr() -> None:
    mine = "last" if is_last() else "first"
    differs(Batch(1, ["a", mine]), "value.labels[1] is 'first'", "'last'")
    differs([1] * (3 if is_last() else 2), "len(value) is 2 on", "3 on")
    differs({"lr": 0.1} if is_last() else {"rate": 0.1}, "value['rate'] is 0.1", "missing")
    differs({1, 2, 3 if is_last() else 4}, "set(['1', '2', '4'])")
    differs(mine + "\x1b[31m", "\\x1b")


def test_a_state_dict_differs() -> None:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(float(is_last()))
        model.bias.fill_(0)
    differs(model, "value.state_dict()['weight'] is [0.0, 0.0]", "[1.0, 1.0]")


def test_a_process_set_compares_alone() -> None:
    if fd.size() < 3:
        pytest.skip("needs a rank outside of the set")
    pair = fd.add_process_set([0, 1])
    value = fd.rank() == 2
    assert fd.same_on_all_ranks(value, "of a pair", pair) is value
    if pair.included():
        with pytest.raises(fd.MismatchError, match="value is 0 on rank 0, 1 on rank 1"):
            fd.same_on_all_ranks(fd.rank(), "of a pair", pair)
    fd.remove_process_set(pair)


def test_what_can_not_be_compared_ends_the_call_on_all_ranks() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    if fd.size() == 1:
        return
    text = "no repr" if is_last() else re.escape(f"rank {last()}")
    with pytest.raises((ValueError, fd.MismatchError), match=text):
        fd.same_on_all_ranks(Odd() if is_last() else 1)
