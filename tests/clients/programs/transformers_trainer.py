# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer beside one process on the joined batch. In ranks, by run.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction, get_last_checkpoint

BATCH, ROWS, LENGTH, WORDS = 16, 96, 6, 12  # BATCH: rows of all ranks in a step


class Sums(Dataset[dict[str, Tensor]]):
    """Rows of numbers; the label says whether their sum is large."""

    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        self.labels = (self.rows.sum(1) > LENGTH * (WORDS - 1) / 2).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def network() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def trainer(folder: str, **options: Any) -> Trainer:
    fields: dict[str, Any] = {
        "use_cpu": True,
        "average_tokens_across_devices": False,
        "per_device_train_batch_size": BATCH // dist.get_world_size(),
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        **options,
    }

    def accuracy(found: EvalPrediction) -> dict[str, float]:
        right = found.predictions.argmax(1) == found.label_ids
        return {"right": float(right.mean()), "rows": float(len(right))}

    return Trainer(
        network(),
        TrainingArguments(folder, **fields),
        train_dataset=Sums(),
        eval_dataset=Sums(37),
        compute_metrics=accuracy,
    )


def flat(model: torch.nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def check_same_everywhere(model: torch.nn.Module) -> None:
    whole = [torch.empty_like(flat(model)) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, flat(model))
    assert all(torch.equal(each, whole[0]) for each in whole)


def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    names = [str(tmp_path_factory.mktemp("trainer"))]
    dist.broadcast_object_list(names)
    return names[0]


def test_accumulation_is_a_larger_batch(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = shared(tmp_path_factory)
    whole = trainer(folder)
    whole.train()
    assert dist.get_backend() == "farandole"
    check_same_everywhere(whole.model)
    half = BATCH // dist.get_world_size() // 2
    parts = trainer(folder, per_device_train_batch_size=half, gradient_accumulation_steps=2)
    parts.train()
    check_same_everywhere(parts.model)
    assert float((flat(whole.model) - flat(network())).abs().max()) > 1e-3


def test_evaluation_takes_each_row_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = trainer(shared(tmp_path_factory), per_device_eval_batch_size=4)
    found = made.evaluate()
    assert found["eval_rows"] == 37
    rows = Sums(37)
    with torch.no_grad():
        right = made.model(rows.rows).logits.argmax(1) == rows.labels
    assert found["eval_right"] == pytest.approx(float(right.float().mean()))


def test_a_checkpoint_goes_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = shared(tmp_path_factory)
    first = trainer(folder, save_strategy="epoch")
    first.train()
    begun = get_last_checkpoint(folder)
    assert begun is not None
    steps = 2 * ROWS // BATCH
    assert begun.endswith(f"checkpoint-{steps}")
    second = trainer(folder)
    second.train(resume_from_checkpoint=begun.replace(f"-{steps}", f"-{steps // 2}"))
    check_same_everywhere(second.model)
    torch.testing.assert_close(flat(second.model), flat(first.model), rtol=1e-4, atol=1e-5)
