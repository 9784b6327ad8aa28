# SPDX-License-Identifier: Apache-2.0
"""How calls meet: names, order, handles, groups, kinds of arrays."""

import random

import numpy as np
import torch

import farandole as fd
from farandole.ops import broadcast_list
from harness.arrays import assert_same, data, reduced


def ones_of(rank, shape=(3,)):
    return np.full(shape, float(rank + 1))


def total(size):
    return size * (size + 1) / 2


def test_names_meet_in_any_order():
    names = [f"tensor.{i}" for i in range(200)]
    order = names.copy()
    random.Random(fd.rank()).shuffle(order)
    for _ in range(3):
        handles = {
            name: fd.allreduce_async(ones_of(fd.rank()) * int(name[7:]), op=fd.Sum, name=name)
            for name in order
        }
        for name in reversed(names):
            expected = total(fd.size()) * int(name[7:])
            assert handles[name].wait().tolist() == [expected] * 3


def test_unnamed_calls_of_different_operations_meet_by_order():
    for i in range(10):
        first = fd.allreduce_async(ones_of(fd.rank()), op=fd.Sum)
        second = fd.broadcast_async(ones_of(fd.rank()), i % fd.size())
        third = fd.allgather_async(ones_of(fd.rank(), (1,)))
        assert third.wait().tolist() == [r + 1.0 for r in range(fd.size())]
        assert second.wait().tolist() == [i % fd.size() + 1.0] * 3
        assert first.wait().tolist() == [total(fd.size())] * 3


def test_group_of_different_dtypes():
    for name in ("group", None):
        inputs = [
            [data(r, (10, i), dtype) for i, dtype in enumerate(["float32", "int8", "float64"])]
            for r in range(fd.size())
        ]
        results = fd.grouped_allreduce(inputs[fd.rank()], op=fd.Sum, name=name)
        for i, result in enumerate(results):
            assert_same(result, reduced("Sum", [theirs[i] for theirs in inputs]))


def test_groups_in_different_order():
    names = [f"group.{i}" for i in range(10)]
    random.Random(fd.rank()).shuffle(names)
    handles = {
        n: fd.grouped_allreduce_async([ones_of(fd.rank())] * 3, op=fd.Sum, name=n) for n in names
    }
    for handle in handles.values():
        assert [x.tolist() for x in handle.wait()] == [[total(fd.size())] * 3] * 3


def test_strided_arrays_are_read_as_they_look():
    grids = [data(r, (6, 4), "float64") for r in range(fd.size())]
    for view in (lambda x: x.T, lambda x: x[::2, ::-1], lambda x: x[:, 1]):
        result = fd.allreduce(view(grids[fd.rank()]), op=fd.Sum)
        assert_same(result, np.ascontiguousarray(view(reduced("Sum", grids))))


def test_groups_of_the_other_collectives():
    size, rank = fd.size(), fd.rank()
    tensors = [ones_of(rank), ones_of(rank, (2, 2))]
    results = fd.grouped_allreduce_(tensors, op=fd.Max)
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert tensors[1].tolist() == [[size, size]] * 2
    gathered = fd.grouped_allgather([ones_of(rank, (1,)), ones_of(rank, (2, 1))])
    assert gathered[0].tolist() == [r + 1.0 for r in range(size)]
    assert gathered[1].shape == (2 * size, 1)
    scattered = fd.grouped_reducescatter([ones_of(rank, (size,)), np.ones((size, 2))], op=fd.Sum)
    assert scattered[0].tolist() == [total(size)]
    assert scattered[1].tolist() == [[size, size]]
    copies = broadcast_list([ones_of(rank), ones_of(rank, (1,))], root_rank=size - 1).wait()
    assert [x.tolist() for x in copies] == [[size] * 3, [size]]


def test_torch_and_numpy_meet_under_one_name():
    mine = ones_of(fd.rank(), (2, 3)).astype("f4")
    tensor = torch.from_numpy(mine.copy())
    x = tensor if fd.rank() % 2 else mine
    result = fd.allreduce(x, op=fd.Sum, name="mixed")
    assert type(result) is type(x)
    assert np.asarray(result).tolist() == [[total(fd.size())] * 3] * 2
    gathered = fd.allgather(x, name="mixed.gather")
    assert type(gathered) is type(x)
    assert np.asarray(gathered).shape == (2 * fd.size(), 3)
    assert fd.broadcast_(x, 0, name="mixed.broadcast") is x
    assert np.asarray(x).tolist() == [[1.0] * 3] * 2
