# SPDX-License-Identifier: Apache-2.0
"""farandole.empty and farandole.torch.empty as arrays, without a job."""

import copy

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd
from farandole.arrays.buffers import DTYPES


@pytest.mark.parametrize("shape", [(), 3, (0,), (4, 0), (2, 3, 5), [7, 1]])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool", "complex128", np.int16])
def test_empty_is_as_numpys(shape, dtype):
    x, y = fd.empty(shape, dtype), np.empty(shape, dtype)
    assert (x.shape, x.dtype, x.strides) == (y.shape, y.dtype, y.strides)
    assert x.flags.writeable
    assert x.flags.c_contiguous


def test_the_usual_dtype_and_too_many_bytes():
    assert fd.empty(2).dtype == np.float64
    with pytest.raises(fd.LibraryError, match="bytes"):
        fd.empty(1 << 60, np.uint8)


@pytest.mark.parametrize("name", [n for n in DTYPES if hasattr(torch, n)])
def test_torchs_empty_of_every_dtype(name):
    dtype = getattr(torch, name)
    for size in ((), (0,), (5,), (2, 3)):
        x = hvd.empty(*size, dtype=dtype)
        assert (x.shape, x.dtype, x.stride()) == (size, dtype, torch.empty(size).stride())
        x.fill_(1)
        assert (x == 1).all()
    assert hvd.empty((4, 5)).shape == hvd.empty([4, 5]).shape == (4, 5)
    assert hvd.empty(3).dtype == torch.get_default_dtype()


def test_copies_of_tensors_are_ordinary():
    x = hvd.empty(1000)
    x.copy_(torch.arange(1000))
    for y in (copy.deepcopy(x), x.clone()):
        assert y.equal(x)
        assert y.data_ptr() != x.data_ptr()
        y.zero_()
    assert x[-1] == 999
