# SPDX-License-Identifier: Apache-2.0
"""Elastic training on handwritten digits: after failures it continues from its last commit.

    farandole run --elastic -np 4 python examples/torch_elastic.py
    farandole run --elastic -np 4 --checkpoint-dir run7 python examples/torch_elastic.py
    FARANDOLE_CHECKPOINT_DIR=run7 mpirun -np 4 python examples/torch_elastic.py  # no supervisor

Meanwhile you may kill a rank, or send it SIGTERM. Expected on 1, 2 or 4 ranks, in either case: the
last line
    test accuracy 0.9... after 8 epochs of 1437 samples
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

import farandole.torch as hvd

EPOCHS = 8
BATCH = 64  # on all ranks together
COMMIT_EVERY = 5  # steps

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)  # the net is tiny; in general, at most the number of cores per rank

digits = load_digits()
images, test_images, labels, test_labels = (
    torch.from_numpy(part)
    for part in train_test_split(
        digits.images.reshape(-1, 64).astype("float32") / 16,
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(images, seed=7)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, samples=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < EPOCHS:
        batch = BATCH // hvd.size()
        batches = torch.tensor(list(state.sampler)).split(batch)
        for i, index in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
            state.sampler.record_batch(i, len(index))
            if i % COMMIT_EVERY == COMMIT_EVERY - 1:
                state.commit()
            else:
                state.check_host_updates()
        state.samples += len(images)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


train(state)
if hvd.rank() == 0:
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
    samples = state.samples // EPOCHS
    print(f"test accuracy {accuracy:.4f} after {EPOCHS} epochs of {samples} samples")
