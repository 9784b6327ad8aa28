# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer on farandole takes one line, before the TrainingArguments are made.

A tiny BERT, built from its configuration (nothing is downloaded), learns to tell whether the sum of
a row of numbers is large.

    pip install "transformers[torch]"
    python examples/transformers_trainer.py --save one.pt            # one process, batches of 64
    mpirun -np 4 python examples/transformers_trainer.py --compare one.pt   # batches of 64 / 4

Expected on 2 or 4 ranks, in about a minute:

    training loss 0.4...
    parameters identical on all ranks: yes
    equal to one process with all data: yes
"""

import tempfile

import torch
from proof import parse_arguments, prove
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import farandole.torch as hvd

BATCH, ROWS, LENGTH, WORDS = 64, 1024, 12, 20  # BATCH: rows per step, on all ranks together


class LargeSums(Dataset[dict[str, Tensor]]):
    """Rows of numbers below WORDS; the label says whether their sum is above the average."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
        self.labels = (self.rows.sum(1) > LENGTH * (WORDS - 1) / 2).long()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def main() -> None:
    options = parse_arguments(__doc__.splitlines()[0], epochs=5)
    hvd.init()
    if hvd.size() > 1:
        torch.distributed.init_process_group("farandole")  # the Trainer finds it, and uses DDP
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,  # dropout would differ between one process and several
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            average_tokens_across_devices=False,  # the loss here is a mean over rows
            per_device_train_batch_size=BATCH // hvd.size(),
            num_train_epochs=options.epochs,
            learning_rate=3e-3,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=hvd.rank() != 0,
        )
        result = Trainer(model, arguments, train_dataset=LargeSums()).train()
    if hvd.rank() == 0:
        print(f"training loss {result.training_loss:.4f}")
    prove(model, options)


if __name__ == "__main__":
    main()
