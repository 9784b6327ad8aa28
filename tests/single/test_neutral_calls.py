# SPDX-License-Identifier: Apache-2.0
"""A world of one: arrays of every kind go in and come back."""

import gc
import sys
import time

import numpy as np
import pytest

import farandole as fd
from farandole import _library
from farandole.arrays import buffers
from farandole.arrays.buffers import DTYPES
from farandole.arrays.kinds import kind_of
from farandole.calls import handles, leases
from farandole.calls.requests import Call, Op, PreparedCall


@pytest.fixture(autouse=True)
def _runtime():
    fd.init()


class WithInterface:
    """An array of another library."""

    def __init__(self, x):
        self.x = x
        self.__array_interface__ = x.__array_interface__


class WithDlpack:
    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class WithNamespace(WithDlpack):
    """An array-API library: results are its own."""

    def __array_namespace__(self):
        return type(self)

    @classmethod
    def from_dlpack(cls, x):
        return cls(x)


def plain(x):
    return np.asarray(x.x if hasattr(x, "x") else x)


KINDS = [
    (np.arange(4.0), np.ndarray),
    (np.float32(3), np.ndarray),
    (WithInterface(np.arange(3)), np.ndarray),
    (WithDlpack(np.arange(3)), np.ndarray),
    (WithNamespace(np.arange(3)), WithNamespace),
]


@pytest.mark.parametrize(("x", "kind"), KINDS, ids=lambda value: type(value).__name__)
def test_kinds(x, kind):
    for result in (fd.allreduce(x), fd.broadcast(x, 0)):
        assert type(result) is kind
        np.testing.assert_array_equal(plain(result), plain(x))
    if plain(x).ndim:
        gathered = fd.allgather(x)
        assert type(gathered) is kind
        np.testing.assert_array_equal(plain(gathered), plain(x))


@pytest.mark.parametrize("two", [2, 2.0, np.float32(2), np.array(2), np.array([2.0])])
def test_factors_may_be_arrays_of_one_element(two):
    for op in (fd.Sum, fd.Adasum):
        x = fd.allreduce(np.ones(2), op=op, prescale_factor=two, postscale_factor=two)
        assert x.tolist() == [4.0, 4.0]


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(5).astype(ml_dtypes.bfloat16)
    for result in (fd.allreduce(x), fd.allgather(x)):
        assert result.dtype == x.dtype
        assert result.tolist() == x.tolist()


def test_dtype_codes_are_the_headers():
    for code, name in enumerate(buffers.DTYPES):
        assert getattr(_library.lib, f"FARANDOLE_{name.upper()}") == code
    for op in Op:
        assert getattr(_library.lib, f"FARANDOLE_{op.name}") == op
    for reduce_op in fd.ReduceOp:
        assert getattr(_library.lib, f"FARANDOLE_{reduce_op.name}") == reduce_op
    for name in ("q", "l", "i8", "p"):
        assert buffers.code_of(np.dtype(name)) == buffers.DTYPES.index("int64")


def test_results_of_the_core_live_as_long_as_their_views():
    x = np.random.default_rng(0).normal(size=(1000, 100))
    view = fd.allgather(x)[500:, 1]
    gc.collect()
    for _ in range(20):
        fd.allgather(np.zeros_like(x))
    np.testing.assert_array_equal(view, x[500:, 1])


def test_only_arrays_without_elements_may_have_a_null_address():
    """EMPTY is 8 bytes: whatever has elements would be read or written beyond them."""
    from farandole.arrays import dlpack
    from farandole.arrays.cuda_array import CudaArray

    null = _library.ffi.NULL
    assert np.asarray(buffers.ResultMemory(null, DTYPES.index("int16"), (0, 3))).shape == (0, 3)
    for shape in ((), (1,), (1 << 40, 2)):
        with pytest.raises(ValueError, match="address is null"):
            buffers.ResultMemory(null, DTYPES.index("float32"), shape)
        with pytest.raises(ValueError, match="address is null"):
            CudaArray.taken(null, DTYPES.index("float32"), shape, 0, 0)

    class OnGpu:
        """Of a library that gives its memory away, as JAX does with what is donated."""

        def __init__(self, shape):
            self.__cuda_array_interface__ = {
                "shape": shape,
                "typestr": "<f4",
                "data": (0, False),
                "version": 3,
            }

        def __dlpack_device__(self):
            return dlpack.CUDA, 0

    kind = kind_of(OnGpu((0,)))
    assert kind.describe(OnGpu((0, 2))).pointer == buffers.EMPTY
    with pytest.raises(ValueError, match=r"OnGpu of shape .* null"):
        kind.describe(OnGpu((2,)))
    # A byte offset makes no address of null.
    capsule = dlpack.capsule(0, (dlpack.CUDA, 0), "float32", (2,), None)
    next(iter(dlpack._lent.values()))[0].tensor.byte_offset = 64
    assert dlpack.read(capsule).pointer == 0


def test_inputs_are_kept_while_under_way():
    x = np.ones(10)
    before = sys.getrefcount(x)
    handle = fd.allreduce_async_(x, name="kept")
    handle.wait()
    del handle
    fd.barrier()
    gc.collect()
    assert sys.getrefcount(x) == before


def test_prepared_calls():
    x, y = np.arange(5.0), np.zeros(5)
    kind = kind_of(x)
    call = PreparedCall(Call(Op.ALLREDUCE, "prepared"), kind.describe(x))
    for _ in range(3):
        handle = call.submit(kind.describe(x).pointer, kind.describe(y, True).pointer, (x, y))
        assert handles.wait_until([handle], None) == 0
        assert not handles.is_absent(handle)
        leases.end([handle])
        assert y.tolist() == x.tolist()
        y[:] = 0
    handle = call.submit(0, kind.describe(y, True).pointer, y)
    assert handles.wait_until([handle], time.monotonic() + 10) == 0
    assert handles.is_absent(handle)
    leases.end([handle])
    call.close()
    with pytest.raises(ValueError, match="forgotten"):
        call.submit(0, 0, None)


def test_questions_of_horovods_scripts():
    assert fd.mpi_built()
    for question in (fd.gloo_built, fd.gloo_enabled, fd.ddl_built, fd.ccl_built, fd.rocm_built):
        assert question() is False
