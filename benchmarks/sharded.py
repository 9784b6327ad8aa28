# SPDX-License-Identifier: Apache-2.0
"""The sharded optimizer: what a step takes, and what memory it saves, beside its peers.

    mpirun -np 2 --bind-to none python benchmarks/sharded.py [--turns 40] [--json F]
    python benchmarks/sharded.py --memory [--ranks 1,2,4]

Steps: a ResNet-18 and a small transformer (small_nets.py), and wide layers (12.6 million
parameters, of which a step does little else than communicate and update), Adam, one torch thread a
rank. In each turn every contestant makes one whole step on the same data: farandole's
DistributedOptimizer, plain and with shard_state=True; DistributedDataParallel with
torch.distributed.optim.ZeroRedundancyOptimizer; FSDP2's fully_shard; both over gloo. A step takes
as long as its slowest rank. Checked: parameters equal to the plain optimizer's, of FSDP2 its loss.

Memory: 100.7 million float32 parameters under Adam, each contestant in a job of its own at each
number of ranks, three steps. Printed: bytes of the optimizer's state, and by how much the largest
resident memory of a process (VmHWM) is above that before the model was made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from small_nets import TASKS, Task
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from turns import Contestant, Row, finish, print_head, take_turns

import farandole.torch as hvd
from farandole.tools.bench_peers import Gloo

PLAIN, SHARDED, ZERO, FSDP = "farandole", "farandole, sharded", "DDP + ZeRO-1", "FSDP2"
CONTESTANTS = (PLAIN, SHARDED, ZERO, FSDP)
_TOLERANCE = 1e-3  # Adam divides by small numbers, so rounding shows
_WIDTH, _LAYERS = 2048, 24  # of the net whose memory is measured


def wide_net(width: int, layers: int) -> nn.Module:
    """Square layers: width**2 parameters each, in one tensor."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _wide_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 1024, generator=generator), torch.randint(1024, (4,), generator=generator)


WIDE = Task("wide layers", "rows", 4, lambda: wide_net(1024, 12), _wide_batch)


class Trainer:
    """One contestant: its own copy of the net, and what it does in a turn."""

    def __init__(self, task: Task, who: str) -> None:
        torch.manual_seed(7)  # the same weights for all contestants, on all ranks
        self.net = task.net()
        self._task, self._step = task, 0
        self._call: nn.Module = self.net
        self.optimizer: Any
        if who == ZERO:
            self._call = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
            self.optimizer = ZeroRedundancyOptimizer(
                self.net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4
            )
            return
        if who == FSDP:
            mesh = init_device_mesh("cpu", (hvd.size(),))
            for part in self.net.children():
                if any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-4)
        if who in (PLAIN, SHARDED):
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, self.net.named_parameters(), shard_state=who == SHARDED
            )

    def contestant(self) -> Contestant:
        """Results are checked at the end, over all steps together."""
        return Contestant(self.prepare, self.run, lambda: 0)

    def prepare(self) -> None:
        """Makes the next step's data."""
        self._data = self._task.data(hvd.rank(), self._step)
        self._step += 1

    def run(self) -> float:
        """One step; its seconds."""
        start = perf_counter()
        self.optimizer.zero_grad()
        self._task.loss(self._call, self._data).backward()
        self.optimizer.step()
        return perf_counter() - start

    def loss(self) -> float:
        """On one batch that is the same on all ranks; collective."""
        self.net.eval()
        with torch.no_grad():
            return float(self._task.loss(self.net, self._task.data(0, -1)))

    def state_bytes(self) -> int:
        """Of the tensors in the optimizer's state on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)  # that of ZeRO
        tensors = [x for state in inner.state.values() for x in state.values()]
        local = (getattr(x, "_local_tensor", x) for x in tensors if isinstance(x, Tensor))
        return sum(x.nbytes for x in local)


def compete(task: Task, turns: int) -> list[Row]:
    """All contestants on one task."""
    trainers = {who: Trainer(task, who) for who in CONTESTANTS}
    contestants = {who: trainer.contestant() for who, trainer in trainers.items()}
    rows = take_turns(task.name, contestants, turns, over=np.max)
    losses = {who: trainer.loss() for who, trainer in trainers.items()}
    expected = trainers[PLAIN].net.parameters()
    for row in rows:
        row.wrong += not np.isclose(losses[row.who], losses[PLAIN], rtol=_TOLERANCE)
        if row.who in (SHARDED, ZERO):
            pairs = zip(trainers[row.who].net.parameters(), expected, strict=True)
            close: Callable[..., bool] = torch.allclose
            row.wrong += sum(not close(x, y, rtol=_TOLERANCE, atol=_TOLERANCE) for x, y in pairs)
            expected = trainers[PLAIN].net.parameters()
    return rows


def show(rows: list[Row]) -> None:
    """One task's table, with each one's ratio to the plain optimizer, by turns."""
    plain = next(row for row in rows if row.who == PLAIN)
    for row in rows if hvd.rank() == 0 else ():
        ms, ratio = 1e3 * row.median, row.ratio(plain)
        print(f"{row.what:24} {row.who:20} {ms:9.1f} {ratio:8.2f} {row.wrong:6}", flush=True)


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def measure_memory(who: str) -> None:
    """Prints the largest figures of all ranks; for a job of one contestant."""
    hvd.init()
    gloo = Gloo()
    task = Task(
        "wide",
        "rows",
        2,
        lambda: wide_net(_WIDTH, _LAYERS),
        lambda g: (torch.randn(2, _WIDTH, generator=g), torch.randint(_WIDTH, (2,), generator=g)),
    )
    hvd.allreduce(torch.ones(1 << 20))  # the runtime's own memory is there
    before = resident("VmRSS")
    trainer = Trainer(task, who)
    for _ in range(3):
        trainer.prepare()
        trainer.run()
    own = torch.tensor([trainer.state_bytes(), resident("VmHWM") - before])
    state, peak = hvd.allreduce(own, op=hvd.Max).tolist()
    if hvd.rank() == 0:
        print(f"{hvd.size():5} {who:20} {state / 2**20:10.0f} {peak / 2**20:10.0f}", flush=True)
    gloo.close()
    hvd.shutdown()


def compare_memory(ranks: str) -> int:
    """One job after the other."""
    print(f"# {_LAYERS * _WIDTH**2 / 1e6:.1f} million float32 parameters, Adam; MiB of one rank")
    print(f"{'ranks':>5} {'who':20} {'state':>10} {'peak':>10}", flush=True)
    for size in ranks.split(","):
        for who in CONTESTANTS:
            command = ["mpirun", "-np", size, "--bind-to", "none", sys.executable, __file__]
            if subprocess.run([*command, "--memory-of", who], check=False).returncode != 0:
                return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--memory", action="store_true", help="compare memory; not under mpirun")
    parser.add_argument("--ranks", default="1,2,4", metavar="LIST", help="for --memory")
    parser.add_argument("--memory-of", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        return compare_memory(options.ranks)
    if options.memory_of is not None:
        measure_memory(options.memory_of)
        return 0
    hvd.init()
    gloo = Gloo()
    print_head(f"{'net':24} {'who':20} {'step ms':>9} {'of plain':>8} {'wrong':>6}")
    rows: list[Row] = []
    for task in (*TASKS, WIDE):
        rows += (of_task := compete(task, options.turns))
        show(of_task)
    code = finish(rows, options.json)
    gloo.close()
    hvd.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
