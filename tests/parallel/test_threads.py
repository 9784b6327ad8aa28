# SPDX-License-Identifier: Apache-2.0
"""Several Python threads submit and wait at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.numpy as fnp
import farandole.torch as hvd


def test_threads_submit_named_calls():
    def work(thread):
        for i in range(25):
            x = np.full(100 * thread + 1, float(fd.rank() + i))
            result = fd.allreduce(x, op=fd.Sum, name=f"thread {thread}, {i}")
            assert result[0] == sum(r + i for r in range(fd.size()))
        return thread

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]


def test_threads_wait_for_one_handle():
    handle = fd.allreduce_async(np.ones(1000), op=fd.Sum, name="shared")
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(handle.wait) for _ in range(4)]
        assert all(r.result() is results[0].result() for r in results)
    assert results[0].result()[0] == fd.size()


def test_a_thread_waits_while_the_main_one_submits():
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(fd.allreduce, np.ones(3), op=fd.Sum, name="early")
        for i in range(50):
            assert fd.allreduce(np.ones(1), op=fd.Sum, name=f"main {i}") == fd.size()
        assert early.result().tolist() == [fd.size()] * 3


def trained() -> Any:
    parameter = torch.nn.Parameter(torch.full((2,), float(fd.rank())))
    optimizer = torch.optim.SGD([parameter], lr=0.1 + fd.rank(), momentum=0.9)
    parameter.grad = torch.full((2,), fd.rank() + 1.0)
    optimizer.step()
    return optimizer


def optimizer_state() -> None:
    optimizer = trained()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].tolist() == [1.0, 1.0]


def parameters() -> None:
    x, y = torch.full((2,), float(fd.rank())), np.full(2, float(fd.rank()))
    hvd.broadcast_parameters({"x": x}, root_rank=fd.size() - 1)
    hvd.broadcast_parameters([x], 0, name="in a thread")
    fnp.broadcast_parameters({"y": y}, fd.size() - 1)
    assert x.tolist() == y.tolist() == [fd.size() - 1.0] * 2


def process_sets() -> None:
    made = fd.add_process_set([fd.size() - 1]) if fd.size() > 1 else fd.global_process_set
    assert fd.remove_process_set(made) == (fd.size() > 1)


def objects() -> None:
    assert fd.allgather_object(fd.rank(), name="thread") == list(range(fd.size()))
    assert fd.broadcast_object(fd.rank(), 0, name="thread") == 0


INTERNAL = {
    "optimizer state": optimizer_state,
    "parameters": parameters,
    "process sets": process_sets,
    "objects": objects,
    "barrier": lambda: fd.barrier(name="thread"),
    "join": fd.join,
}


@pytest.mark.parametrize("call", INTERNAL)
def test_calls_that_name_themselves_come_from_any_thread(call: str) -> None:
    """The unnamed calls of the main thread keep their order meanwhile."""
    assert fd.allreduce(np.ones(1), op=fd.Sum) == fd.size()
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(INTERNAL[call])
        if call != "join":  # of which a rank makes no calls
            for _ in range(20):
                assert fd.allreduce(np.ones(1), op=fd.Sum) == fd.size()
        thread.result()
        with pytest.raises(ValueError, match="give it a name"):
            pool.submit(fd.barrier).result()
    assert fd.allreduce(np.ones(1), op=fd.Sum) == fd.size()
