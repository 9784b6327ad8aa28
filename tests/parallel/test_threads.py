# SPDX-License-Identifier: Apache-2.0
"""Several Python threads submit and wait at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import farandole as fd


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
