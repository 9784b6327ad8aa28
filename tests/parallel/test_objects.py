# SPDX-License-Identifier: Apache-2.0
"""Objects between ranks: broadcast and gathered, of any type and size."""

import os
import zlib

import numpy as np
import pytest

import farandole as fd


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("stays here")


def test_broadcast_object():
    for root in range(fd.size()):
        mine = {"rank": fd.rank(), "values": [1.5, "x", None], "array": np.arange(fd.rank())}
        got = fd.broadcast_object(mine, root_rank=root, name=f"object.{root}")
        assert got["rank"] == root
        assert len(got["array"]) == root
        assert (got is mine) == (fd.rank() == root)


def test_broadcast_function():
    offset = fd.rank() + 10
    assert fd.broadcast_object(lambda x: x + offset)(1) == 11


def test_large_object():
    blob = os.urandom(5_000_000) if fd.rank() == 0 else b""
    got = fd.broadcast_object(blob)
    assert len(got) == 5_000_000
    assert len(set(fd.allgather_object(zlib.crc32(got)))) == 1


def test_allgather_object():
    objects = fd.allgather_object({"rank": fd.rank(), "text": "é" * 1000 * fd.rank()})
    assert [len(x["text"]) for x in objects] == [1000 * r for r in range(fd.size())]
    assert fd.allgather_object(None) == [None] * fd.size()


def test_object_that_cannot_be_pickled_fails_everywhere():
    mine = Unpicklable() if fd.rank() == 0 else {}
    with pytest.raises((RuntimeError, ValueError), match="stays here"):
        fd.broadcast_object(mine, name="bad object")
    with pytest.raises((RuntimeError, ValueError), match="stays here"):
        fd.allgather_object(mine, name="bad gather")
    assert fd.allgather_object(fd.rank()) == list(range(fd.size()))


@pytest.mark.ranks(3, 4)
def test_objects_in_a_process_set():
    pair = fd.add_process_set([0, 2])
    if pair.included():
        assert fd.allgather_object(fd.rank(), process_set=pair) == [0, 2]
        assert fd.broadcast_object(fd.rank(), root_rank=2, process_set=pair) == 2
    fd.barrier()
    assert fd.remove_process_set(pair)
