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
from typing import Any

import numpy as np
import torch
from small_nets import TASKS, Task, wide
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import Trainer
from turns import Row, finish, print_head, take_turns

import farandole.torch as hvd
from farandole.tools.bench_peers import Gloo

PLAIN, SHARDED, ZERO, FSDP = "farandole", "farandole, sharded", "DDP + ZeRO-1", "FSDP2"
CONTESTANTS = (PLAIN, SHARDED, ZERO, FSDP)
_TOLERANCE = 1e-3  # Adam divides by small numbers, so rounding shows
_WIDTH, _LAYERS = 2048, 24  # of the net whose memory is measured


class Sharder(Trainer):
    """One contestant of training.py's kind, with Adam."""

    def optimizer_of(self, who: str) -> Any:
        """What the contestant steps by."""
        if who == ZERO:
            self._call = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
            return ZeroRedundancyOptimizer(
                self.net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4
            )
        if who == FSDP:
            mesh = init_device_mesh("cpu", (hvd.size(),))
            for part in self.net.children():
                if any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        adam = torch.optim.Adam(self.net.parameters(), lr=1e-4)
        if who == FSDP:
            return adam
        named = self.net.named_parameters()
        return hvd.DistributedOptimizer(adam, named, shard_state=who == SHARDED)

    def state_bytes(self) -> int:
        """Of the tensors in the optimizer's state on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)  # that of ZeRO
        tensors = [x for state in inner.state.values() for x in state.values()]
        local = (getattr(x, "_local_tensor", x) for x in tensors if isinstance(x, Tensor))
        return sum(x.nbytes for x in local)


def compete(task: Task, turns: int) -> list[Row]:
    """All contestants on one task."""
    trainers = {who: Sharder(task, who) for who in CONTESTANTS}
    contestants = {who: trainer.contestant() for who, trainer in trainers.items()}
    rows = take_turns(task.name, contestants, turns, over=np.max)
    losses = {who: trainer.final_loss() for who, trainer in trainers.items()}
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
    hvd.allreduce(torch.ones(1 << 20))  # the runtime's own memory is there
    before = resident("VmRSS")
    trainer = Sharder(wide(_WIDTH, _LAYERS, 2), who)
    contestant = trainer.contestant()
    for _ in range(3):
        contestant.prepare()
        contestant.run()
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
    for task in (*TASKS, wide(1024, 12, 4)):
        rows += (of_task := compete(task, options.turns))
        show(of_task)
    code = finish(rows, options.json)
    gloo.close()
    hvd.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
