# SPDX-License-Identifier: Apache-2.0
"""Torch tensors as buffers, compressors, groups and names: all that needs no other rank."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from farandole.buffers import DTYPES, EMPTY, Memory, kind_of
from farandole.torch.compression import Compression, chooser
from farandole.torch.groups import assign
from farandole.torch.kind import TorchKind, describe
from farandole.torch.names import parameter_names


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


def test_refusals() -> None:
    refused: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "sparse_as_dense", torch.eye(2).to_sparse()),
        (TypeError, "meta", torch.zeros(2, device="meta")),
        (ValueError, "not contiguous", torch.zeros(2, 3).t()),
        (ValueError, "not contiguous", torch.tensor([1j]).conj()),
    ]
    for error, text, x in refused:
        with pytest.raises(error, match=text):
            describe(x, in_place=True)


def test_results_become_tensors_without_a_copy() -> None:
    from farandole._library import ffi

    kind = TorchKind()
    for name in ("float32", "bfloat16", "bool", "int64", "uint16"):
        if not hasattr(torch, name):
            continue
        dtype = getattr(torch, name)
        memory = Memory(ffi.NULL, DTYPES.index(name), (0, 3))
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
    assert chooser(Compression.fp16)("name", x) is Compression.fp16
    assert chooser(lambda name, parameter: Compression.bf16)("name", x) is Compression.bf16
    with pytest.raises(TypeError, match="compress and decompress"):
        chooser("fp16")  # type: ignore[arg-type]


def test_numbers_of_groups() -> None:
    ps = [nn.Parameter(torch.zeros(1)) for _ in range(7)]
    ps[3].requires_grad_(False)
    assert assign(ps, None, 0) == assign(ps, 0, 0) == {}
    groups = assign(ps, 4, 0)
    assert id(ps[3]) not in groups
    numbers = [groups[id(p)] for i, p in enumerate(ps) if i != 3]
    assert [number for number, _ in numbers] == sorted(number for number, _ in numbers)
    assert sorted(set(numbers)) == [(0, 1), (1, 2), (2, 1), (3, 2)]
    assert {size for _, size in assign(ps, 100, 0).values()} == {1}
    lists = assign(ps, [[ps[5], ps[0]], [ps[2]]], 0)
    assert lists == {id(ps[5]): (0, 2), id(ps[0]): (0, 2), id(ps[2]): (1, 1)}


def test_names() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1)
    assert parameter_names(optimizer, model.named_parameters()) == ["bias", "weight"]
    assert parameter_names(optimizer, None) == ["group[0][0]", "group[1][0]"]


def test_neutral_kind_is_found_without_importing_the_adapter() -> None:
    program = "import torch, farandole.buffers as b; print(type(b.kind_of(torch.ones(1))).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "TorchKind"


def test_import_without_torch_names_the_package() -> None:
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Missing())
try:
    import farandole.torch
except ImportError as reason:
    print(reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "pip install torch" in done.stdout
