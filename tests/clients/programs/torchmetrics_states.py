# SPDX-License-Identifier: Apache-2.0
"""Metrics of torchmetrics, with each kind of state, on parts of the data: the same as one process
computes on all. In ranks, by run.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import (
    Accuracy,
    CatMetric,
    ConfusionMatrix,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError, SpearmanCorrCoef

CLASSES, ROWS, BATCHES = 5, 7, 3
ROWS_OF_ALL = BATCHES * ROWS


def batches(uneven: bool) -> list[Tensor]:
    """This rank's numbers of rows; the last rank has one row more in each batch."""
    extra = int(uneven and dist.get_rank() == dist.get_world_size() - 1)
    torch.manual_seed(dist.get_rank())
    return [torch.rand(ROWS + extra, CLASSES) for _ in range(BATCHES)]


def of_all(own: list[Tensor]) -> list[Tensor]:
    gathered: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return [batch for theirs in gathered for batch in theirs]


def labels(scores: Tensor) -> Tensor:
    return (scores[:, 0] * 1000).long() % CLASSES


Update = Callable[[Metric, Tensor], None]
CASES: dict[str, tuple[Callable[..., Metric], Update]] = {
    "sum": (SumMetric, lambda m, x: m.update(x)),
    "mean": (MeanMetric, lambda m, x: m.update(x, weight=x + 1)),
    "max": (MaxMetric, lambda m, x: m.update(x)),
    "min": (MinMetric, lambda m, x: m.update(x)),
    "mse": (MeanSquaredError, lambda m, x: m.update(x[:, 0], x[:, 1])),
    "pearson, merged by formula": (PearsonCorrCoef, lambda m, x: m.update(x[:, 0], x[:, 1])),
    "spearman, of all rows": (SpearmanCorrCoef, lambda m, x: m.update(x[:, 0], x[:, 1])),
    "auroc, of all rows": (BinaryAUROC, lambda m, x: m.update(x[:, 0], labels(x) % 2)),
    "accuracy": (
        lambda **kw: Accuracy(task="multiclass", num_classes=CLASSES, **kw),
        lambda m, x: m.update(x, labels(x)),
    ),
    "f1": (
        lambda **kw: MulticlassF1Score(num_classes=CLASSES, average="macro", **kw),
        lambda m, x: m.update(x, labels(x)),
    ),
    "confusion": (
        lambda **kw: ConfusionMatrix(task="multiclass", num_classes=CLASSES, **kw),
        lambda m, x: m.update(x, labels(x)),
    ),
}


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("case", CASES)
def test_as_one_process(case: str, uneven: bool) -> None:
    make, update = CASES[case]
    metric, alone = make(), make(distributed_available_fn=lambda: False)
    own = batches(uneven)
    for batch in own:
        update(metric, batch)
    for batch in of_all(own):
        update(alone, batch)
    torch.testing.assert_close(metric.compute(), alone.compute())


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_rows_of_all_ranks_in_order(uneven: bool) -> None:
    metric, own = CatMetric(), batches(uneven)
    for batch in own:
        metric.update(batch)
    whole = torch.cat([batch.reshape(-1) for batch in of_all(own)])
    torch.testing.assert_close(metric.compute().reshape(-1), whole)


def test_a_rank_without_rows() -> None:
    metric = SpearmanCorrCoef()
    whole = of_all(batches(False))[: ROWS_OF_ALL // ROWS]
    if dist.get_rank() == 0:
        for batch in whole:
            metric.update(batch[:, 0], batch[:, 1])
    alone = SpearmanCorrCoef(distributed_available_fn=lambda: False)
    for batch in whole:
        alone.update(batch[:, 0], batch[:, 1])
    torch.testing.assert_close(metric.compute(), alone.compute())


def test_a_collection_and_forward() -> None:
    options: dict[str, Any] = {"num_classes": CLASSES, "dist_sync_on_step": True}
    both = MetricCollection(
        Accuracy(task="multiclass", **options), MulticlassF1Score(average="macro", **options)
    )
    own = batches(False)[0]
    value = both(own, labels(own))
    alone = MetricCollection(
        Accuracy(task="multiclass", num_classes=CLASSES, distributed_available_fn=lambda: False),
        MulticlassF1Score(CLASSES, average="macro", distributed_available_fn=lambda: False),
    )
    rows = torch.cat(of_all([own]))
    torch.testing.assert_close(value, alone(rows, labels(rows)))
