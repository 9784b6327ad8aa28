# SPDX-License-Identifier: Apache-2.0
"""Torch tensors as buffers, compressors and names: all that needs no other rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.arrays.buffers import DTYPES, EMPTY, ResultMemory
from farandole.arrays.kinds import kind_of
from farandole.torch.arguments import parameter_names
from farandole.torch.compression import Compression
from farandole.torch.kind import TorchKind, address_of, describe, device_and_stream, is_lazy
from harness.wrapped_tensors import WRAPPED, Held


def test_an_amd_gpu_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch for ROCm calls its devices cuda."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    with pytest.raises(TypeError, match=r"AMD GPU .*ROCm 6\.4\.2.*remedy: .*x\.cpu\(\).*RCCL"):
        device_and_stream(torch.device("cuda:0"))
    assert device_and_stream(torch.device("cpu")) == (-1, 0)


@pytest.mark.parametrize("device", ["xpu:0", "mps:0"])
def test_other_devices_are_refused_with_the_remedy(device: str) -> None:
    with pytest.raises(TypeError, match=rf"tensors on device {device} .*remedy: .*x\.cpu\(\)"):
        device_and_stream(torch.device(device))


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    x = torch.zeros(3, 4, dtype=dtype)
    buffer = describe(x, in_place=True)
    assert DTYPES[buffer.dtype] == name
    assert (buffer.pointer, buffer.shape) == (x.data_ptr(), (3, 4))
    assert (buffer.device, buffer.stream) == (-1, 0)
    assert isinstance(kind_of(x), TorchKind)


def test_leaves_and_views() -> None:
    leaf = nn.Parameter(torch.arange(6.0).view(2, 3))
    assert describe(leaf, in_place=True).pointer == leaf.data_ptr()
    turned = describe(leaf.t())
    assert turned.shape == (3, 2)
    assert isinstance(turned.owner, torch.Tensor)
    assert torch.equal(turned.owner, leaf.t())
    conjugate = torch.tensor([1 + 2j]).conj()
    owner: Any = describe(conjugate).owner
    assert torch.view_as_real(owner).tolist() == [[1.0, -2.0]]
    assert describe(torch.zeros(0, 2)).pointer == EMPTY
    assert describe(torch.tensor(1.0)).shape == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals() -> None:
    refused: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "sparse_as_dense", torch.eye(2).to_sparse()),
        (TypeError, "meta", torch.zeros(2, device="meta")),
        (ValueError, "not contiguous", torch.zeros(2, 3).t()),
        (ValueError, r"conjugated \(x.is_conj", torch.tensor([1j]).conj()),
        (ValueError, r"negated \(x.is_neg", torch.tensor([1j]).conj().imag),
        (TypeError, "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        (TypeError, "one batch through", nn.LazyLinear(3).weight),
    ]
    for error, text, x in refused:
        with pytest.raises(error, match=text):
            describe(x, in_place=True)


def lazily_negated() -> torch.Tensor:
    """Contiguous, as only one of a single element is by torch's public means."""
    return torch.tensor([1 + 2j]).conj().imag


def test_lazy_bits_are_resolved() -> None:
    for x in (lazily_negated(), torch._neg_view(torch.ones(3)), torch.ones(3, 2).mul(1j).conj()):
        assert is_lazy(x)
        assert x.is_contiguous()
        buffer = describe(x)
        owner: Any = buffer.owner
        assert not is_lazy(owner)
        assert torch.equal(owner, x)
        assert buffer.pointer == owner.data_ptr()
        assert TorchKind().lent(x, x.dtype, x.shape, False)[0] == 0


def freed(x: torch.Tensor, to: int = 0) -> torch.Tensor:
    """As FSDP frees parameters: the tensor stays as it is, its storage does not."""
    x.untyped_storage().resize_(to)
    return x


SHORT_OF_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "freed": lambda: freed(torch.ones(3)),
    "freed leaf": lambda: freed(nn.Parameter(torch.ones(3))),
    "freed and turned": lambda: freed(torch.ones(3, 2).t()),
    "freed, of no dimension": lambda: freed(torch.tensor(1.0)),
    "too small": lambda: freed(torch.ones(3), 11),
    "too small for where it begins": lambda: freed(torch.ones(6)[3:], 12),
    "too small for its strides": lambda: freed(torch.ones(6)[::2], 16),
    "freed and conjugated": lambda: freed(torch.ones(3, dtype=torch.complex64).conj()),
}


@pytest.mark.parametrize("case", SHORT_OF_MEMORY)
@pytest.mark.parametrize("in_place", [False, True])
def test_storage_that_was_freed_or_shrunk(case: str, in_place: bool) -> None:
    x = SHORT_OF_MEMORY[case]()
    with pytest.raises(ValueError, match=r"storage of \d+ bytes .*resize_"):
        address_of(x)
    with pytest.raises(ValueError, match="storage of"):
        describe(x, in_place)
    assert TorchKind().lent(x, x.dtype, x.shape, in_place)[0] == 0


def test_storage_that_is_large_enough() -> None:
    whole = torch.arange(6.0)
    fitting = [whole, whole[3:], whole[::2], whole.expand(4, 6), whole[:1].expand(3), whole[5]]
    fitting += [freed(torch.ones(3), 12), freed(torch.ones(6)[::2], 20), whole.view(2, 3).t()]
    for x in fitting:
        assert address_of(x) == x.data_ptr()
        if x.is_contiguous():
            assert TorchKind().lent(x, x.dtype, x.shape, True)[0] == x.data_ptr()
    for x in (torch.zeros(0, 2), whole[6:], freed(torch.zeros(0)), whole.view(2, 3)[:, 3:]):
        assert address_of(x) == describe(x).pointer == EMPTY
        assert TorchKind().lent(x, x.dtype, x.shape, True)[0] in (0, EMPTY)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("form", ["plain", "turned", "of no dimension", "leaf"])
def test_wrappers_of_other_tensors(name: str, form: str) -> None:
    wrap, remedy = WRAPPED[name]
    x = torch.ones(()) if form == "of no dimension" else torch.ones(3, 2)
    wrapped = wrap(x.t() if form == "turned" else x)
    if form == "leaf":
        wrapped.requires_grad_()
    for in_place in (False, True):
        with pytest.raises(TypeError, match=f"{name} cannot be sent, .*{remedy}"):
            describe(wrapped, in_place)
    with pytest.raises(TypeError, match=f"{name} cannot be sent"):
        address_of(wrapped)


def test_subclasses_that_hold_their_elements() -> None:
    class Named(torch.Tensor):
        pass

    for x in (nn.Parameter(torch.ones(3)), torch.ones(3).as_subclass(Named), Held(torch.ones(3))):
        assert describe(x, in_place=True).pointer == x.data_ptr()
        assert TorchKind().lent(x, x.dtype, x.shape, True)[0] == x.data_ptr()
    with pytest.raises(TypeError, match=r"x.clone\(\)"):
        describe(torch._efficientzerotensor(3))


def test_results_become_tensors_without_a_copy() -> None:
    from farandole._library import ffi

    kind = TorchKind()
    for name in ("float32", "bfloat16", "bool", "int64", "uint16"):
        if not hasattr(torch, name):
            continue
        dtype = getattr(torch, name)
        memory = ResultMemory(ffi.NULL, DTYPES.index(name), (0, 3))
        result = kind.wrap(memory, torch.zeros(1, dtype=dtype))
        assert (result.dtype, tuple(result.shape)) == (dtype, (0, 3))
    like = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    assert kind.empty(like, (4,)).shape == (4,)
    assert not kind.empty(like).requires_grad


def test_compressors() -> None:
    x = torch.tensor([1.0, 1 / 3])
    for compressor, dtype in (
        (Compression.fp16, torch.float16),
        (Compression.bf16, torch.bfloat16),
        (Compression.none, torch.float32),
    ):
        wire, context = compressor.compress(x)
        assert wire.dtype is dtype
        assert compressor.decompress(wire, context).dtype is torch.float32
        integers = torch.ones(2, dtype=torch.int32)
        assert compressor.compress(integers)[0] is integers


def test_names() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1)
    assert parameter_names(optimizer, model.named_parameters()) == ["bias", "weight"]
    assert parameter_names(optimizer, None) == ["group[0][0]", "group[1][0]"]
