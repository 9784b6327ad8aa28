# SPDX-License-Identifier: Apache-2.0
"""Compares DDP and FSDP2 over the backends `farandole` and gloo, which alternate.

    mpirun -np 2 --bind-to none python benchmarks/ddp_backend.py [--turns 40] [--seconds 60]
                                                                 [--only W] [--json F]

The 161 gradients of ResNet-50 arrive one by one in backward() (resnet50.py), as views of DDP's
buckets. A transformer computes between its gradients. Prints a step's time minus that of the same
step without communication (DDP: in no_sync(); FSDP2: the unsharded model), and ratios.
`DDP alone` is DDP with a hook that sends nothing. No backend can avoid its cost.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import resnet50
import torch
import torch.distributed as dist
from backward import Behind, exposed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from turns import Row, finish, head

import farandole.torch as hvd

WIDTH, LAYERS, TOKENS = 256, 4, 64


class LanguageModel(nn.Module):
    """A transformer encoder with its rank's own batch. forward() returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, dropout=0) for _ in range(LAYERS)]
        self.body = nn.Sequential(*layers)
        torch.manual_seed(1 + hvd.rank())
        self.data = torch.randn(TOKENS, 4, WIDTH)
        own = deepcopy(self)
        own(torch.zeros(())).backward()
        gradients = [p.grad for p in own.parameters() if p.grad is not None]
        self.wanted = {1: gradients, hvd.size(): hvd.grouped_allreduce(gradients)}

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.body(self.data + x).square().mean()
        return loss

    def clear(self) -> None:
        for p in self.parameters():
            p.grad = None

    def wrong(self, ranks: Sequence[int]) -> int:
        """Number of gradients that are not the average over `ranks`: all ranks, or this one."""
        found: list[Any] = [p.grad for p in self.parameters()]
        wholes = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
        pairs = zip(wholes, self.wanted[len(ranks)], strict=True)
        return sum(not torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in pairs)


class Alone(Behind):
    """A model in DDP that sends nothing, so its results are not checked."""

    def __init__(self, model: Any, group: Any) -> None:
        super().__init__(model, group)
        self.call.register_comm_hook(None, send_nothing)
        self.model = SimpleNamespace(clear=model.clear, wrong=lambda ranks: 0)


def send_nothing(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook; completes at once."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Sharded:
    """A transformer in FSDP2. Steps without communication use an unsharded one."""

    def __init__(self, model: LanguageModel, group: Any) -> None:
        self.whole, self.sharded, self.model = model, deepcopy(model), self
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in self.sharded.body:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.sharded, mesh=mesh)
        self.call: nn.Module = self.sharded

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.call = self.whole
        yield
        self.call = self.sharded

    def end(self) -> None:
        pass

    def clear(self) -> None:
        self.whole.clear()
        self.sharded.clear()

    def wrong(self, ranks: Sequence[int]) -> int:
        return (self.sharded if len(ranks) > 1 else self.whole).wrong(ranks)


def cases(groups: dict[str, Any], turns: int, seconds: float, only: str) -> Iterator[Row]:
    shapes = resnet50.shapes()
    makers: dict[str, tuple[Callable[[], Any], Any]] = {
        "ResNet-50, DDP": (lambda: resnet50.Chain(shapes, hvd.rank()), Behind),
        "transformer, DDP": (LanguageModel, Behind),
        "transformer, FSDP2": (LanguageModel, Sharded),
    }
    for what, (model, wrap) in makers.items():
        if only in what:
            who = {name: wrap(model(), group) for name, group in groups.items()}
            if wrap is Behind:
                who["DDP alone"] = Alone(model(), groups["gloo"])
            yield from exposed(what, who, turns, budget=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60, help="time per case (approximate)")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    groups = {"farandole": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    head()
    rows = list(cases(groups, options.turns, options.seconds, options.only))
    code = finish(rows, options.json)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
