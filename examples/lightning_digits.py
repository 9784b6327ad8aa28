# SPDX-License-Identifier: Apache-2.0
"""Runs Lightning's DDP strategy with farandole as the backend of torch.distributed.

    pip install lightning scikit-learn
    python examples/lightning_digits.py --save one.pt                # one process, batches of 64
    mpirun -np 4 python examples/lightning_digits.py --compare one.pt       # batches of 64 / 4

Expected on 2 or 4 ranks, in well under a minute:

    test accuracy 0.9...
    parameters identical on all ranks: yes
    equal to one process with all data: yes
"""

import lightning
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from proof import parse_arguments, prove
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import farandole.torch as hvd

BATCH, TRAINED = 64, 1536  # images per step, over all ranks; training images (the rest test)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    options = parse_arguments(__doc__.splitlines()[0], epochs=10)
    hvd.init()
    strategy: Strategy | str = "auto"
    if hvd.size() > 1:
        strategy = DDPStrategy(
            process_group_backend="farandole", cluster_environment=MPIEnvironment()
        )
    digits = load_digits()
    torch.manual_seed(0)
    order = torch.randperm(len(digits.target))  # the same on all ranks
    images = torch.tensor(digits.data).float()[order] / 16
    labels = torch.tensor(digits.target)[order]
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=hvd.local_size(),
        num_nodes=hvd.cross_size(),
        strategy=strategy,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # it would shuffle, unlike a run in one process
        logger=False,
        enable_checkpointing=False,
    )
    data = TensorDataset(images[:TRAINED], labels[:TRAINED])
    share = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
    trainer.fit(model, DataLoader(data, batch_size=BATCH // hvd.size(), sampler=share))
    with torch.no_grad():
        right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
    if hvd.rank() == 0:
        print(f"test accuracy {right:.4f}")
    prove(model, options)


if __name__ == "__main__":
    main()
