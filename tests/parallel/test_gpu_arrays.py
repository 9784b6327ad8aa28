# SPDX-License-Identifier: Apache-2.0
"""Arrays on GPUs through the neutral calls: over the GPU double, by its NCCL and by host memory."""

import ctypes
import gc
import os
import weakref

import numpy as np
import pytest

import farandole as fd
from farandole._library import lib
from farandole.adasum import coefficients
from farandole.arrays import dlpack
from farandole.arrays.cuda_array import CudaArray
from farandole.calls import leases
from harness.arrays import assert_same, data, reduced
from harness.gpu_double import Array, Gpu, use_double

pytestmark = pytest.mark.world("double")  # the GPU double stays in a process

use_double()
OUT_OF_MEMORY = 2


@pytest.fixture(params=["nccl", "host"], scope="module")
def gpu(request):
    """This rank's, with buckets through each kind of backend."""
    fd.shutdown()
    os.environ["FARANDOLE_GPU_BACKEND"] = request.param
    fd.init()
    return Gpu(fd.rank())


def everyone(shape, dtype, salt=0):
    return [data(rank, shape, dtype, salt) for rank in range(fd.size())]


def test_a_group_of_gpu_and_cpu_memory_is_refused(gpu):
    mine = [gpu.array(data(fd.rank(), (10,), "f4")), data(fd.rank(), (10,), "f4")]
    with pytest.raises(ValueError, match="be all on the CPU, or all on the GPU; make a group"):
        fd.grouped_allreduce(mine, op=fd.Sum)


def test_the_same_call_again_and_again(gpu):
    for step in range(10):
        inputs = everyone((1000,), "float32", salt=step)
        mine = gpu.array(inputs[fd.rank()])
        for name in ("again", None):
            result = fd.allreduce(mine, op=fd.Sum, name=name)
            assert_same(gpu.read(result), reduced("Sum", inputs))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("in_place", [False, True])
def test_adasum(gpu, dtype, in_place):
    for shape in [(1,), (7, 5), (0,), (100_003,)]:
        rng = np.random.default_rng(7)
        inputs = [((r + 1) * rng.standard_normal(shape)).astype(dtype) for r in range(fd.size())]
        mine = gpu.array(inputs[fd.rank()])
        call = fd.allreduce_ if in_place else fd.allreduce
        result = call(mine, op=fd.Adasum, name=f"{dtype} {shape}")
        rows = np.stack(inputs).reshape(fd.size(), -1).astype("f8")
        wanted = (coefficients(rows @ rows.T) @ rows).reshape(shape)
        size = fd.size() * max(1.0, np.abs(rows).max(initial=0.0))
        values = gpu.read(result)
        assert values.dtype == dtype
        assert (result is mine) == in_place
        error = np.abs(values.astype("f8") - wanted).max(initial=0.0)
        assert error <= 4 * np.finfo(dtype).eps * size
        if not in_place:
            np.testing.assert_array_equal(gpu.read(mine), inputs[fd.rank()])


def test_adasum_is_waited_for_in_any_order_and_stream(gpu):
    inputs = everyone((300,), "float64")
    rows = np.stack(inputs)
    wanted = coefficients(rows @ rows.T) @ rows
    arrays = [gpu.array(inputs[fd.rank()] * (k + 1), gpu.new_stream()) for k in range(3)]
    handles = [fd.allreduce_async_(x, op=fd.Adasum, name=f"{k}") for k, x in enumerate(arrays)]
    for k in (2, 0, 1):
        assert handles[k].wait() is arrays[k]
    for k, x in enumerate(arrays):  # the results are there, in whatever stream one looks
        seen = gpu.read(x, gpu.new_stream())
        np.testing.assert_allclose(seen, wanted * (k + 1), rtol=1e-9, atol=1e-9)


def test_a_wait_returns_while_the_callers_stream_is_busy(gpu):
    x = gpu.array(np.full(1000, -1.0, "f4"), gpu.new_stream())
    gpu.synchronize(x.stream)
    gate = gpu.gate(x.stream)  # a slow kernel
    x.write(np.full(1000, fd.rank(), "f4"))
    handle = fd.allreduce_async_(x, op=fd.Sum)
    if os.environ["FARANDOLE_GPU_BACKEND"] == "nccl":  # host memory is reduced by the host
        assert handle.wait() is x
        assert handle.poll()
        assert ctypes.c_float.from_address(x.address).value == -1.0
    gpu.open(gate)
    assert handle.wait() is x
    assert gpu.read(x).tolist() == [sum(range(fd.size()))] * 1000


def test_other_streams_that_wait_see_the_result_too(gpu):
    other = gpu.new_stream()
    inputs = everyone((5000,), "float32")
    x = gpu.array(inputs[fd.rank()])
    handle = fd.allreduce_async_(x, op=fd.Sum)
    handle.wait()
    x.stream = other
    handle.wait()
    assert_same(gpu.read(x, other), reduced("Sum", inputs))


def test_dropped_handles_keep_their_buffers(gpu):
    for i in range(30):
        fd.allreduce_async_(gpu.array(np.full(3000, 1.0)), op=fd.Sum, name=f"dropped.{i}")
        fd.allreduce_async(gpu.array(np.full(3000, 1.0)), op=fd.Sum)
        gc.collect()
    x = gpu.array(np.ones(1))
    assert gpu.read(fd.allreduce(x, op=fd.Sum)).tolist() == [fd.size()]


def test_a_stream_lives_as_long_as_results_in_it(gpu):
    x = gpu.array(np.arange(3.0) + fd.rank(), gpu.new_stream())
    expected = [i + rank for rank in range(fd.size()) for i in range(3)]
    named = weakref.ref(x)  # an array that names a stream keeps it alive
    result = fd.allgather(x, name="first")
    del x
    passed_on = fd.allgather(result, name="second")
    first = result.stream
    del result
    settle()
    assert named() is not None
    assert passed_on.stream.owner is first.owner  # not the result before it
    assert gpu.read(passed_on).tolist() == expected * fd.size()
    del passed_on, first
    settle()
    assert named() is None


def test_a_result_dropped_while_its_stream_is_captured_is_freed_later(gpu):
    x = gpu.array(np.ones(3), gpu.new_stream())
    result, another = (fd.allgather(x, name=f"captured.{i}") for i in range(2))
    address = result.address
    settle()
    gpu.capture(x.stream)
    del result
    gpu.end_capture(x.stream)
    assert lib.farandole_device_of(address) == gpu.device
    del another
    assert lib.farandole_device_of(address) < 0


def settle():
    """Until the core uses no memory of earlier calls; then nothing is lent to it."""
    while leases.in_flight():
        os.sched_yield()
    leases.sweep(1 << 16)
    gc.collect()


class DlpackOnly:
    """An array that says where it lies by DLPack alone."""

    def __init__(self, x: Array, gpu: Gpu) -> None:
        self.x, self.gpu = x, gpu

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.gpu.device

    def __dlpack__(self, *, stream: int | None = None) -> object:
        self.gpu.synchronize(self.x.stream)
        device = self.__dlpack_device__()
        return dlpack.capsule(self.x.address, device, self.x.dtype.name, self.x.shape, self.x)


def test_dlpack_in_and_out(gpu):
    inputs = everyone((40, 3), "float64")
    mine = DlpackOnly(gpu.array(inputs[fd.rank()]), gpu)
    result = fd.allreduce(mine, op=fd.Sum)
    assert isinstance(result, CudaArray)
    told = dlpack.read(result.__dlpack__(stream=gpu.stream))
    assert told[1:] == ((dlpack.CUDA, gpu.device), "float64", (40, 3), None)
    gathered = fd.allgather(result)  # a result of ours is an input as any other
    assert_same(gpu.read(gathered), np.concatenate([reduced("Sum", inputs)] * fd.size()))
    assert fd.allreduce_(mine, op=fd.Max) is mine
    gpu.synchronize(1)  # the default stream is the caller's where nobody names one
    assert_same(gpu.read(mine.x), reduced("Max", inputs))


@pytest.mark.ranks(2, 3, 4)  # one rank: the set of all is there already
def test_process_sets(gpu):
    """Each has a communicator."""
    fd.allreduce_(gpu.array(np.full(5000, 1.0, "f4")), op=fd.Sum)
    evens = fd.add_process_set([r for r in range(fd.size()) if r % 2 == 0])
    if evens.included():
        x = gpu.array(np.full(5000, fd.rank() + 1.0, "f4"))
        fd.allreduce_(x, op=fd.Sum, process_set=evens)
        assert gpu.read(x).tolist() == [sum(r + 1.0 for r in evens.ranks)] * 5000
    fd.barrier()
    fd.remove_process_set(evens)


def test_what_cannot_be_sent(gpu):
    x = gpu.array(np.full(8, fd.rank(), "f4"))
    gpu.synchronize(x.stream)  # freeing what earlier tests left would spoil the capture
    gc.collect()
    leases.sweep(10_000)
    gpu.capture(x.stream)
    with pytest.raises(ValueError, match="CUDA graph"):
        fd.allreduce(x, name="captured")
    gpu.end_capture(x.stream)
    x.read_only = True
    with pytest.raises(ValueError, match="read-only"):
        fd.allreduce_(x)
    strided = gpu.array(np.zeros((4, 4)))
    for shape, strides in (((4, 4), (8, 32)), ((4, 1), (32, 8))):  # turned, and a column
        told = {**strided.__cuda_array_interface__, "shape": shape, "strides": strides}
        view = type("View", (), {"__cuda_array_interface__": told})()
        with pytest.raises(ValueError, match="not contiguous"):
            fd.allreduce(view)


@pytest.mark.ranks(2, 3, 4)
def test_messages(gpu):
    """Rings both ways, several at once, each pair by a backend of its own."""
    size, rank = fd.size(), fd.rank()
    for step in (1, -1):
        to, source = (rank + step) % size, (rank - step) % size
        shapes = [(3, 2), (300_000,), (1,)]
        gots = [gpu.array(np.zeros(shape, "f4")) for shape in shapes]
        sends = [
            fd.send_async(gpu.array(data(rank, s, "float32", salt=i)), to, tag=i)
            for i, s in enumerate(shapes)
        ]
        receives = [fd.recv_async(got, source, tag=i) for i, got in enumerate(gots)]
        for handle in (*sends, *receives):
            assert handle.wait() in (None, source)
        for i, (got, shape) in enumerate(zip(gots, shapes, strict=True)):
            assert_same(gpu.read(got), data(source, shape, "float32", salt=i))
    if rank < 2:
        mine = np.zeros(5) if rank == 0 else gpu.array(np.zeros(5))
        call = fd.send_async(mine, 1) if rank == 0 else fd.recv_async(mine, 0)
        with pytest.raises(fd.MismatchError, match=r"on the CPU, .* on the GPU"):
            call.wait()


@pytest.mark.ranks(2, 3, 4)
def test_gpu_memory_here_and_cpu_memory_there(gpu):
    values = np.zeros(3000)
    with pytest.raises(fd.MismatchError, match="device"):
        fd.allreduce(values if fd.rank() else gpu.array(values), name="two kinds")


def test_out_of_memory_names_the_bytes(gpu):
    x = gpu.array(np.full(1000, fd.rank(), "f4"))
    fd.allreduce_(x, name="before")
    gpu.lib.gpu_double_fail(b"cuMemAllocFromPoolAsync", 0, OUT_OF_MEMORY)
    with pytest.raises(fd.LibraryError, match="4000 bytes"):
        fd.allreduce(x, name="no memory")
    gpu.lib.gpu_double_heal()
    mean = (fd.size() - 1) / 2
    assert gpu.read(fd.allreduce(x, op=fd.Max)).tolist() == [mean] * 1000


@pytest.mark.ranks(2, 3, 4)
def test_peers_of_a_rank_without_memory_fail_too(gpu):
    x = gpu.array(np.full(1000, fd.rank(), "f4"))
    if fd.rank() == 1:
        gpu.lib.gpu_double_fail(b"cuMemAllocFromPoolAsync", 0, OUT_OF_MEMORY)
    with pytest.raises(fd.LibraryError, match="no memory for 4000 bytes"):
        fd.allreduce(x, name="no memory on rank 1")
    gpu.lib.gpu_double_heal()
