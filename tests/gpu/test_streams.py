# SPDX-License-Identifier: Apache-2.0
"""Stream order without blocking the host, whatever the streams and whoever owns the memory next.

A slow kernel makes the case that needs care the only one: what it holds up is still to come when
the host goes on.
"""

import numpy as np
import pytest

import farandole as fd
from harness.gpu_arrays import LIBRARIES, slow

pytestmark = pytest.mark.ranks(1, 2)
COUNT = 300_000  # float32: over 1 MiB, reduced where it is
SMALL = 1000  # packed with others


@pytest.fixture(params=list(LIBRARIES))
def library(request):
    found = LIBRARIES[request.param]()
    # NCCL connects, and CUDA loads kernels, when something is used for the first time: what
    # follows is not held up by that.
    for count in (SMALL, COUNT):
        fd.allreduce(found.full(count, 1.0), op=fd.Sum)  # each operator is a kernel of NCCL's
        fd.allreduce_(found.full(count, 1.0), op=fd.Sum)
    fd.allgather(found.full(SMALL + fd.rank(), 1.0))
    return found


def total(step=0):
    """Of all ranks' contributions in a step."""
    return sum(1.0 + rank + 10 * step for rank in range(fd.size()))


def own(step=0):
    return 1.0 + fd.rank() + 10 * step


@pytest.mark.parametrize("count", [SMALL, COUNT])
@pytest.mark.parametrize("in_place", [False, True])
def test_host_goes_on_while_the_input_is_still_to_come(library, count, in_place):
    stream = library.stream()
    call = fd.allreduce_async_ if in_place else fd.allreduce_async
    with library.current(stream):
        x = library.full(count, -1.0)
        slow(library.pointer(stream), 1.0)
        x[:] = own()
        result = call(x, op=fd.Sum, name=f"late.{count}.{in_place}").wait()
        assert not library.idle(stream)  # the host did not wait for the slow kernel
        assert np.all(library.get(result) == total())


@pytest.mark.parametrize("in_place", [False, True])
def test_calls_that_come_again_use_the_stream_of_each_time(library, in_place):
    """They are prepared once, with another stream."""
    call = fd.allreduce_ if in_place else fd.allreduce
    for step in range(6):
        stream = library.stream()
        with library.current(stream):
            x = library.full(SMALL, -1.0)
            slow(library.pointer(stream), 0.05)
            x[:] = own(step)
            result = call(x, op=fd.Sum, name=f"again.{in_place}")
            assert (result is x) == in_place
            assert np.all(library.get(result) == total(step))


def test_gradients_from_several_streams_are_used_on_another(library):
    producers, consumer = [library.stream() for _ in range(3)], library.stream()
    handles = []
    for step, stream in enumerate(producers * 4):
        with library.current(stream):
            slow(library.pointer(stream), 0.01)
            x = library.full(COUNT if step % 2 else SMALL, own(step))
            handles.append(fd.allreduce_async(x, op=fd.Sum, name=f"produced.{step}"))
            del x
    with library.current(consumer):
        for step, handle in enumerate(handles):
            doubled = 2 * handle.wait()  # queued behind the reduction by wait()
            assert np.all(library.get(doubled) == 2 * total(step)), step


def test_a_handle_dropped_at_once_keeps_its_memory(library):
    """So is its array; then two streams take what memory of that size is free and write there."""
    first, second = library.stream(), library.stream()
    kept = []
    for step in range(8):
        with library.current(first):
            slow(library.pointer(first), 0.02)
            x = library.full(COUNT, own(step))
            dropped = fd.allreduce_async(x, op=fd.Sum, name=f"dropped.{step}")
            handle = fd.allreduce_async(x, op=fd.Sum, name=f"kept.{step}")
            del dropped, x
        rubbish = []
        for stream in (first, second):
            with library.current(stream):
                rubbish += [library.full(COUNT, -1e6) for _ in range(4)]
        del rubbish
        kept.append(handle)
        if step % 2:  # results outlive their handles
            kept[-1] = kept[-1].wait()
    with library.current(first):
        for step, result in enumerate(kept):
            value = result if step % 2 else result.wait()
            assert np.all(library.get(value) == total(step)), step


def test_peers_that_come_late_find_the_memory_unchanged(library):
    """Rank 0 frees and refills what it has sent before the others have sent theirs."""
    stream = library.stream()
    with library.current(stream):
        for step in range(5):
            if fd.rank() == 0:
                x = library.full(COUNT, own(step))
                handle = fd.allreduce_async(x, op=fd.Sum, name=f"early.{step}")
                del x
                library.full(COUNT, -1e6)
            fd.barrier()
            if fd.rank() != 0:
                x = library.full(COUNT, own(step))
                handle = fd.allreduce_async(x, op=fd.Sum, name=f"early.{step}")
            assert np.all(library.get(handle.wait()) == total(step))


def test_results_of_negotiated_size_may_be_dropped_at_once(library):
    """Their memory is the core's: it may be given to another result once the stream has passed."""
    stream = library.stream()
    with library.current(stream):
        for step in range(20):
            gathered = fd.allgather(library.full(SMALL + fd.rank(), own(step)))
            copy = 1.0 * gathered
            del gathered
            fd.allgather(library.full(SMALL + fd.rank(), -1.0))
            values = library.get(copy)
            starts = np.cumsum([0] + [SMALL + rank for rank in range(fd.size())])
            for rank in range(fd.size()):
                assert np.all(values[starts[rank] : starts[rank + 1]] == 1.0 + rank + 10 * step)


@pytest.mark.ranks(2)
def test_a_timeout_names_what_it_waits_for(library):
    if fd.rank() == 0:
        handle = fd.allreduce_async(library.full(SMALL, own()), op=fd.Sum, name="awaited")
        with pytest.raises(fd.StallError, match="awaited"):
            handle.wait(timeout=0.5)
    fd.barrier()
    if fd.rank() != 0:
        handle = fd.allreduce_async(library.full(SMALL, own()), op=fd.Sum, name="awaited")
    assert np.all(library.get(handle.wait()) == total())


def test_capture_is_refused_with_the_reason():
    """A negotiated call can't be part of a CUDA graph, and the stream is usable afterwards."""
    import torch

    x = torch.full((SMALL,), own(), device="cuda")
    fd.allreduce_(x.clone())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        y = x + 1
        with pytest.raises(ValueError, match="captured into a CUDA graph"):
            fd.allreduce_(x, op=fd.Sum)
        graph.capture_end()
        graph.replay()
    stream.synchronize()
    assert torch.all(y == own() + 1)
    fd.allreduce_(x, op=fd.Sum)
    assert torch.all(x == total())
