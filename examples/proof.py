# SPDX-License-Identifier: Apache-2.0
"""Checks the results of examples in this folder; your own script does not need it."""

import argparse

import torch
from torch import Tensor, nn

import farandole.torch as hvd


def parse_arguments(description: str, epochs: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--save", help="file for the parameters")
    parser.add_argument("--compare", help="file with parameters that must be equal")
    return parser.parse_args()


def prove(model: nn.Module, options: argparse.Namespace) -> None:
    """Compares the parameters of all ranks, also with those of a run in one process."""
    own: Tensor = nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = hvd.allgather(own.unsqueeze(0))
    identical = bool((everywhere == everywhere[0]).all())
    if hvd.rank() != 0:
        return
    print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
    if options.save:
        torch.save(own, options.save)
    if options.compare:
        equal = torch.allclose(own, torch.load(options.compare, weights_only=True), atol=1e-3)
        print(f"equal to one process with all data: {'yes' if equal else 'NO'}")
