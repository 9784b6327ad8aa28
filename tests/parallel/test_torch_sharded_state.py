# SPDX-License-Identifier: Apache-2.0
"""shard_state=True: full state and parts of it, saved and loaded at any number of ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.extras.sharded.layout import Part, layout_of
from harness.sharded import (
    MAKES,
    Lion,
    assert_states_equal,
    same_on_all,
    sharded,
)
from harness.toys import assert_same, network, train, train_both

together = pytest.mark.ranks(2, 3, 4)


# ---- state


def parts_of(optimizer: Any) -> list[Any]:
    """All ranks' parts, as from their files."""
    return [
        pickle.loads(x) for x in hvd.allgather_object(pickle.dumps(optimizer.sharded_state_dict()))
    ]


def test_merged_parts_are_the_full_state() -> None:
    model = network()
    optimizer = sharded(model, Lion)
    train(model, optimizer, range(3))
    assert_states_equal(hvd.merge_sharded_state_dicts(parts_of(optimizer)), optimizer.state_dict())


@pytest.mark.parametrize("name", ["SGD", "Adam", "Lion"])
@pytest.mark.parametrize("form", ["full", "part", "merged"])
def test_training_goes_on_from_state(name: str, form: str) -> None:
    model, reference = network(), network()
    optimizer, alone = sharded(model, MAKES[name]), MAKES[name](reference.parameters())
    train(model, optimizer, range(3))
    train(reference, alone, range(6), alone=True)
    saved = {
        "full": optimizer.state_dict,
        "part": optimizer.sharded_state_dict,
        "merged": lambda: hvd.merge_sharded_state_dicts(parts_of(optimizer)),
    }[form]()
    saved = copy.deepcopy(saved)
    later = network()
    later.load_state_dict(model.state_dict())
    resumed = sharded(later, MAKES[name])
    resumed.load_state_dict(saved)
    train(later, resumed, range(3, 6))
    assert_same(later, reference)


@pytest.mark.parametrize("other", [1, 2, 5, 7])
def test_state_of_another_number_of_ranks(other: int) -> None:
    """From plain state divided for `other` ranks, as if they had saved it; and back to plain."""
    reference = network()
    alone = MAKES["Adam"](reference.parameters())
    train(reference, alone, range(3), alone=True)
    full, saved = alone.state_dict(), []
    for number in range(other):
        parts = [Part.of(p, number, other) for p in reference.parameters()]
        own = {i: part.shorten(full["state"][i], "") for i, part in enumerate(parts)}
        state = {i: piece for i, piece in own.items() if piece is not None}
        saved.append({**full, "state": state, "layout": layout_of(parts)})
    model = network()
    model.load_state_dict(reference.state_dict())
    optimizer = sharded(model)
    optimizer.load_state_dict(hvd.merge_sharded_state_dicts(copy.deepcopy(saved[::-1])))
    train_both(model, optimizer, reference, alone, range(3, 6))
    back = MAKES["Adam"](reference.parameters())
    back.load_state_dict(optimizer.state_dict())
    assert_states_equal(back.state_dict(), alone.state_dict())


def test_state_from_before_is_divided() -> None:
    """A plain optimizer loads a checkpoint, and becomes a sharded one."""
    reference, model = network(), network()
    alone = MAKES["Adam"](reference.parameters())
    train(reference, alone, range(3), alone=True)
    model.load_state_dict(reference.state_dict())
    plain = MAKES["Adam"](model.parameters())
    plain.load_state_dict(copy.deepcopy(alone.state_dict()))
    optimizer = hvd.DistributedOptimizer(plain, shard_state=True)
    train_both(model, optimizer, reference, alone, range(3, 6))


@together
def test_steps_after_a_load_leave_the_loaded_state_as_it_was() -> None:
    """A program may go back to the same state twice."""
    model = network()
    optimizer = sharded(model, MAKES["Adam"])
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 4))
    assert_states_equal(saved, before)


@together
def test_wrong_parts_are_refused() -> None:
    model = network()
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    parts = parts_of(optimizer)
    with pytest.raises(ValueError, match=r"parts \[0\]: pass each of"):
        hvd.merge_sharded_state_dicts(parts[:1])
    with pytest.raises(ValueError, match="is not a part"):
        hvd.merge_sharded_state_dicts([optimizer.state_dict()])
    with pytest.raises(ValueError, match="load merge_sharded_state_dicts"):
        optimizer.load_state_dict(parts[hvd.rank() - 1])
    with pytest.raises(TypeError, match="not copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="each rank keeps a part"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.raises(ValueError, match="elastic"):
        hvd.elastic.TorchState(model, optimizer)


def test_broadcast_before_the_first_step() -> None:
    model = network()
    optimizer = sharded(model, lambda ps: torch.optim.Adam(ps, lr=0.01 * (1 + hvd.rank())))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, range(2))
    same_on_all(model)
