# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm equals BatchNorm on the joined batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    torch.set_num_threads(1)


def batch(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rank + 2, *shape, generator=generator, dtype=torch.float64)
    return (x * (1 + rank) + 10 * rank).to(dtype)


CASES = [((3,), torch.float64), ((3, 5), torch.float32), ((3, 4, 4), torch.float64)]
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_equals_the_joined_batch(
    shape: tuple[int, ...], dtype: torch.dtype, affine: bool, momentum: float | None
) -> None:
    plain = PLAIN[len(shape)](3, momentum=momentum, affine=affine, dtype=dtype)
    if affine:
        with torch.no_grad():
            plain.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            plain.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    layer = hvd.SyncBatchNorm(3, momentum=momentum, affine=affine).to(dtype)
    layer.load_state_dict(plain.state_dict())
    rows = [rank + 2 for rank in range(hvd.size())]
    begin = sum(rows[: hvd.rank()])
    mine = slice(begin, begin + rows[hvd.rank()])
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
    for step in range(2):
        joined = torch.cat([batch(r, shape, dtype) + step for r in range(hvd.size())])
        joined.requires_grad_()
        own = joined.detach()[mine].clone().requires_grad_()
        slope = torch.arange(joined.numel(), dtype=dtype).view_as(joined).cos()
        expected = plain(joined)
        (expected * slope).sum().backward()
        y = layer(own)
        (y * slope[mine]).sum().backward()
        torch.testing.assert_close(y, expected[mine], **tolerance)
        torch.testing.assert_close(own.grad, joined.grad[mine], **tolerance)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict(), **tolerance)
        if affine:
            for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
                total = hvd.allreduce(p.grad, op=hvd.Sum)
                torch.testing.assert_close(total, q.grad, **tolerance)
    layer.eval()
    plain.eval()
    torch.testing.assert_close(layer(own), plain(joined)[mine], **tolerance)


def test_an_empty_batch_on_one_rank() -> None:
    layer = hvd.SyncBatchNorm(2)
    rows = 0 if hvd.rank() == 0 and hvd.size() > 1 else 3
    x = torch.randn(rows, 2, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert torch.isfinite(layer.running_mean).all()


def test_two_layers_and_a_process_set() -> None:
    n = hvd.size()
    ranks = list(range(max(1, n - 1)))
    some = hvd.add_process_set(ranks) if len(ranks) < n else hvd.global_process_set
    model = nn.Sequential(
        hvd.SyncBatchNorm(2, process_set=some), nn.Tanh(), hvd.SyncBatchNorm(2, process_set=some)
    ).double()
    reference = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2)).double()
    if some.included():
        joined = torch.cat([batch(r, (2,), torch.float64) for r in ranks])
        own = batch(hvd.rank(), (2,), torch.float64)
        begin = sum(r + 2 for r in range(hvd.rank()))
        torch.testing.assert_close(model(own), reference(joined)[begin : begin + len(own)])
    if some is not hvd.global_process_set:
        hvd.remove_process_set(some)


def test_convert() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(4)))
    parameters = list(model.parameters())
    state = model.state_dict()
    model.eval()
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm)
    assert isinstance(model[2][0], hvd.SyncBatchNorm)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model.state_dict().keys() == state.keys()
    assert not model[1].training
    assert hvd.convert_sync_batchnorm(model[1]) is model[1]


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        hvd.SyncBatchNorm(2)(torch.zeros(2))
