# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with DDP, and its Fabric, beside one process on the joined batch.
In ranks, by run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import farandole.torch as hvd

ROWS, EPOCHS = 24, 2  # rows of all ranks in a step


class Model(lightning.LightningModule):
    """A small network whose metrics are averages over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def rows() -> TensorDataset:
    torch.manual_seed(7)
    return TensorDataset(torch.randn(5 * ROWS, 8), torch.randint(3, (5 * ROWS,)))


def loader() -> DataLoader[Any]:
    """This rank's part."""
    share = DistributedSampler(rows(), hvd.size(), hvd.rank(), shuffle=False)
    return DataLoader(rows(), batch_size=ROWS // hvd.size(), sampler=share)


def alone() -> tuple[nn.Module, float]:
    """Trained by one process, and its loss on all rows."""
    model = Model()
    optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in DataLoader(rows(), batch_size=ROWS):
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    x, y = rows().tensors
    with torch.no_grad():
        return model, float(F.cross_entropy(model.layers(x), y))


def check(model: nn.Module) -> None:
    for p, wanted in zip(model.parameters(), alone()[0].parameters(), strict=True):
        torch.testing.assert_close(p.data, wanted.data, rtol=1e-3, atol=1e-5)


def trainer(**options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=hvd.local_size(),
        num_nodes=hvd.cross_size(),
        strategy=DDPStrategy(
            process_group_backend="farandole", cluster_environment=MPIEnvironment()
        ),
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def test_fit_with_metrics_and_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("best"))))
    model, keep = Model(), ModelCheckpoint(folder, monitor="loss")
    run = trainer(callbacks=[keep])
    run.fit(model, loader(), loader())
    assert torch.distributed.get_backend() == "farandole"
    check(model)
    assert float(run.callback_metrics["loss"]) == pytest.approx(alone()[1], rel=1e-3)
    again = Model()
    (found,) = trainer(enable_checkpointing=False).validate(
        again, loader(), ckpt_path=keep.best_model_path, verbose=False
    )
    assert found["loss"] == pytest.approx(float(keep.best_model_score), rel=1e-5)


def test_fabric() -> None:
    fabric = Fabric(
        accelerator="cpu",
        devices=hvd.local_size(),
        num_nodes=hvd.cross_size(),
        strategy=FabricDDP(process_group_backend="farandole", cluster_environment=MPIEnvironment()),
    )
    fabric.launch()
    plain = Model()
    model, optimizer = fabric.setup(plain, plain.configure_optimizers())
    model.mark_forward_method("training_step")
    for _ in range(EPOCHS):
        for batch in loader():
            optimizer.zero_grad()
            fabric.backward(model.training_step(batch, 0))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
    check(plain)
    gathered = fabric.all_gather(torch.tensor([fabric.global_rank]))
    assert gathered.flatten().tolist() == list(range(hvd.size()))
    assert fabric.all_reduce(torch.ones(2), reduce_op="sum").tolist() == [hvd.size()] * 2
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
