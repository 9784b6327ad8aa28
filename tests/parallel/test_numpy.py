# SPDX-License-Identifier: Apache-2.0
"""farandole.numpy's helpers for training."""

import numpy as np
import pytest

import farandole.numpy as hvd
from farandole.parameters import items


def model_of(rank):
    return {
        "weight": np.random.default_rng(rank).normal(size=(30, 20)),
        "half": np.full(7, rank, np.float16),
        "mask": np.array([rank % 2 == 0] * 3),
        "step": np.array(rank),
        "empty": np.zeros((0, 3)),
    }


def test_broadcast_parameters():
    for root in range(hvd.size()):
        for as_list in (False, True):
            model, expected = model_of(hvd.rank()), model_of(root)
            hvd.broadcast_parameters(list(model.values()) if as_list else model, root_rank=root)
            for name, x in model.items():
                np.testing.assert_array_equal(x, expected[name])


def test_nested_parameters():
    """Dicts and lists at will; the way to an array is its name."""

    def model(rank):
        layers = [{"weight": np.full((2, 3), rank + layer)} for layer in range(2)]
        return {"layers": layers, "head": (np.array(10 + rank), np.full(4, 20 + rank))}

    mine, root = model(hvd.rank()), hvd.size() - 1
    hvd.broadcast_parameters(mine, root_rank=root)
    for (name, x), (wanted, expected) in zip(items(mine), items(model(root)), strict=True):
        assert name == wanted
        np.testing.assert_array_equal(x, expected)
    assert [name for name, _ in items(mine)][::3] == ["head.0", "layers.1.weight"]


def test_named_pairs():
    root = hvd.size() - 1
    pairs = [(name, np.full(3, 10.0 * hvd.rank() + i)) for i, name in enumerate("ba")]
    assert [name for name, _ in items(pairs)] == ["b", "a"]
    assert [name for name, _ in items({"l": ("w", np.ones(1))})] == ["l.0", "l.1"]
    hvd.broadcast_parameters(pairs, root_rank=root)
    assert [x.tolist() for _, x in pairs] == [[10.0 * root + i] * 3 for i in range(2)]


@pytest.mark.ranks(2, 3, 4)
def test_models_that_differ():
    model = {"weight": np.ones(3 + hvd.rank() % 2)}
    with pytest.raises(hvd.MismatchError, match=r"parameter\.weight"):
        hvd.broadcast_parameters(model)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.parametrize("who", ["all", "rank 0"])
@pytest.mark.ranks(2, 3)
def test_a_name_that_is_given_twice_is_an_error(who):
    """Else one of the two arrays would keep this rank's values."""
    arrays = [np.full(3, 1.0 + hvd.rank()) for _ in range(2)]
    names = ("b", "c") if who == "rank 0" and hvd.rank() else (1, "1")
    layers = dict(zip(names, arrays, strict=True))
    with pytest.raises(ValueError, match=r"params holds 'a\.1' twice"):
        hvd.broadcast_parameters({"a": layers})
    for x in arrays:
        assert (x == 1.0 + hvd.rank()).all()
