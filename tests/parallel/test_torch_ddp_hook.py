# SPDX-License-Identifier: Apache-2.0
"""ddp_comm_hook: DDP over gloo whose gradients farandole reduces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from harness.toys import batch, joined, loss_of, network, train_both

# gloo's threads live on in the process
pytestmark = [pytest.mark.world("gloo"), pytest.mark.ranks(2, 3)]
OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
SMALL = 1e-4  # MB: several buckets


@pytest.fixture(autouse=True)
def gloo(tmp_path: Path) -> Iterator[None]:
    # A store that goes waits for its file if that has gone, so nobody removes it here.
    path = hvd.broadcast_object(str(tmp_path / "store"), 0)
    store = dist.FileStore(path, hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    yield
    dist.destroy_process_group()


def hooked(model: nn.Module, **options: Any) -> Any:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, **options)
    ddp.register_comm_hook(hvd.DDPHookState(), hvd.ddp_comm_hook)
    return ddp


@pytest.mark.parametrize(
    "options",
    [{}, *({name: True} for name in OPTIONS)],
    ids=lambda options: next(iter(options), "plain"),
)
def test_equals_joined_batch(options: dict[str, bool]) -> None:
    model, reference = network(), network()
    ddp = hooked(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_both(ddp, optimizer, reference, plain, range(4), clip=0.5)


def test_two_models_and_no_sync() -> None:
    models, references = [network(), network()], [network(), network()]
    ddps = [hooked(model) for model in models]
    for ddp, reference in zip(ddps, references, strict=True):
        with ddp.no_sync():
            loss_of(ddp, batch(hvd.rank(), 0)).backward()
        loss_of(ddp, batch(hvd.rank(), 1)).backward()
        for step in range(2):
            loss_of(reference, joined(step)).backward()
    for model, reference in zip(models, references, strict=True):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("state", [None, hvd.DDPHookState], ids=["none", "the class"])
def test_another_state_is_an_error_that_names_the_right_one(state: Any) -> None:
    ddp = DistributedDataParallel(network())
    ddp.register_comm_hook(state, hvd.ddp_comm_hook)
    with pytest.raises(TypeError, match=r"register_comm_hook\(hvd.DDPHookState\(\), hvd.ddp"):
        loss_of(ddp, batch(hvd.rank(), 0)).backward()
    with pytest.raises(TypeError, match="process_set"):
        hvd.DDPHookState([0, 1])  # type: ignore[arg-type]


def test_a_rank_that_has_left_is_an_error_of_backward() -> None:
    ddp = hooked(network())
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    with pytest.raises(hvd.PeerError, match=r"ranks? [\d, ]*\b1\b"):
        loss_of(ddp, batch(hvd.rank(), 0)).backward()
    hvd.shutdown()
