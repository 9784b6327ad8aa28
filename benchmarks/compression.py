# SPDX-License-Identifier: Apache-2.0
"""Compressors with error feedback beside plain allreduce: accuracy, bytes, and when each pays.

    python benchmarks/compression.py accuracy [--ranks 2] [--seeds 5] [--nets digits sorting]
        [--forms none int8 "topk 0.02"]
    python benchmarks/compression.py links [--rates none 1gbit 100mbit]    # needs root

`accuracy` trains two nets, with every compressor and each seed in turns: a perceptron on
scikit-learn's digits, and a transformer of torch.nn that learns to sort ten digits. A line gives
test accuracy (mean and standard deviation over the seeds), tensor bytes a step by the metrics
(`bytes_done` of a rank: buffers, whichever way they go) and the time of a step.

`links` reduces one gradient of 4 million floats on two simulated hosts of one rank each, whose link
is shaped by tc. `sent` is what left a host by the kernel's counters, `CPU` the time that a rank's
threads have computed. From these follows the model: a reduction takes t + 8 B / rate, where t is
its CPU time without shaping, so a compressor pays below

    rate = 8 (B_plain - B) / (t - t_plain).

CPU time is used since other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from torch import Tensor, nn

MARK = "row: "
ELEMENTS = 1 << 22  # of the gradient in `links`
CALLS = 7  # of each compressor there


def compressors() -> dict[str, Any]:
    """All that are compared; the first is plain."""
    import farandole.torch as hvd

    kinds = hvd.Compression
    return {
        "none": kinds.none,
        "bf16": kinds.bf16,
        "int8": kinds.int8(),
        "onebit": kinds.onebit(),
        "powersgd 4": kinds.powersgd(4),
        "topk 0.02": kinds.topk(0.02),
        "topk 0.05": kinds.topk(0.05),
    }


# ---- in the ranks


def digits(seed: int) -> tuple[nn.Module, Any, Tensor, Tensor, Tensor, Tensor]:
    """A perceptron, its optimizer's class, training and test data."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.25, random_state=seed, stratify=y)
    x0, x1 = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y0, y1 = (torch.tensor(part) for part in parts[2:])
    net = nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    return net, torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9), x0, y0, x1, y1


def sorting(seed: int) -> tuple[nn.Module, Any, Tensor, Tensor, Tensor, Tensor]:
    """A transformer that sorts ten digits."""
    import torch
    from torch import nn

    class Sorter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(10, 64) * 0.1)
            self.letters = nn.Embedding(10, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.layers(self.letters(x) + self.places))
            return found

    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 10, (20000, 10), generator=generator)
    y = x.sort(1).values
    net = Sorter()
    return net, torch.optim.Adam(net.parameters(), lr=1e-3), x[512:], y[512:], x[:512], y[:512]


def train(
    task: Callable[[int], Any], compression: Any, seed: int, steps: int
) -> tuple[float, float, float]:
    """Test accuracy, bytes a step, and seconds a step, of this rank."""
    import torch
    from torch.nn.functional import cross_entropy

    import farandole.torch as hvd

    torch.manual_seed(seed)
    net, optimizer, x, y, x_test, y_test = task(seed)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), compression)
    draw = torch.Generator().manual_seed(100 * seed + hvd.rank())
    before, seconds = hvd.metrics()["bytes_done"], []
    for _ in range(steps):
        batch = torch.randint(0, len(x), (32,), generator=draw)
        optimizer.zero_grad()
        begin = time.perf_counter()
        cross_entropy(net(x[batch]).flatten(0, -2), y[batch].flatten()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    moved = (hvd.metrics()["bytes_done"] - before) / steps
    with torch.no_grad():
        right = (net(x_test).argmax(-1) == y_test).float().mean().item()
    return right, moved, median(seconds)


NETS: dict[str, tuple[Callable[[int], Any], int]] = {  # and the steps of a training
    "digits": (digits, 500),
    "sorting": (sorting, 1200),
}


def accuracy_job(seeds: int, nets: list[str], forms: list[str]) -> None:
    """Prints a row for each training."""
    import torch

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for seed in range(seeds):
        for name, compression in compressors().items():
            for net in nets if name in forms or not forms else ():
                task, steps = NETS[net]
                right, moved, seconds = train(task, compression, seed, steps)
                if hvd.rank() == 0:
                    row = [net, name, right, moved, seconds]
                    print(MARK + json.dumps(row), flush=True)


def sent() -> int:
    """Bytes that have left this host."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0"))


def links_job() -> None:
    """Prints a row for each compressor."""
    import torch
    from torch import nn

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for name, compression in compressors().items():
        p = nn.Parameter(torch.zeros(2048, ELEMENTS // 2048))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=compression)
        grad = torch.randn(p.shape)
        seconds, computing = [], []
        for call in range(CALLS + 1):
            optimizer.zero_grad()
            hvd.barrier()
            before, begin, cpu = sent(), time.perf_counter(), time.process_time()
            p.backward(grad)
            optimizer.step()
            hvd.barrier()
            seconds.append(time.perf_counter() - begin)
            computing.append(time.process_time() - cpu)
            if call == 0:  # pages, connections
                seconds.clear()
                computing.clear()
        if hvd.rank() == 0:
            row = [name, median(seconds), median(computing), sent() - before]
            print(MARK + json.dumps(row), flush=True)


# ---- outside


def rows_of(
    arguments: list[str], ranks: int, env: dict[str, str], hosts: list[str]
) -> list[list[Any]]:
    """Runs this file as a job."""
    from harness.mpirun import MpiJob

    rows = []
    env = {**env, "OMP_NUM_THREADS": "1"}
    with MpiJob([sys.executable, __file__, *arguments], ranks, env, hosts) as job:
        for line in job.process.lines():
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
        job.finish(30).check()
    return rows


def accuracy(ranks: int, seeds: int, nets: list[str], forms: list[str]) -> None:
    """Prints the table of the nets."""
    chosen = ["--seeds", str(seeds), "--nets", *nets, "--forms", *forms]
    rows = rows_of(["accuracy-job", *chosen], ranks, {}, [])
    print(f"{'net':9}{'compression':13}{'accuracy':>9}{'sd':>8}{'KB/step':>9}{'ms/step':>9}")
    for net, name in dict.fromkeys((row[0], row[1]) for row in rows):
        found = [row[2:] for row in rows if row[:2] == [net, name]]
        right, moved, seconds = zip(*found, strict=True)
        spread = stdev(right) if len(right) > 1 else 0.0
        print(
            f"{net:9}{name:13}{mean(right):9.4f}{spread:8.4f}{mean(moved) / 1e3:9.1f}"
            f"{1e3 * median(seconds):9.2f}"
        )


def links(rates: list[str]) -> None:
    """Prints the table of each rate, and the rate below which each compressor pays."""
    from harness.hosts import simulated_hosts, why_not

    if reason := why_not():
        sys.exit(f"simulated hosts: {reason}")
    times: dict[str, dict[str, float]] = {}
    computing: dict[str, float] = {}
    crossed: dict[str, float] = {}
    for rate in rates:
        with (
            tempfile.TemporaryDirectory() as folder,
            simulated_hosts(Path(folder), [1, 1]) as hosts,
        ):
            if rate != "none":
                hosts.shape(rate)
            for name, seconds, cpu, nbytes in rows_of(
                ["links-job"], 2, hosts.environment(), hosts.mpi_args()
            ):
                times.setdefault(name, {})[rate] = seconds
                computing.setdefault(name, cpu)
                crossed[name] = nbytes
    head = f"{'compression':13}{'sent MB':>9}{'CPU ms':>8}"
    print(head + "".join(f"{'ms ' + rate:>13}" for rate in rates) + f"{'pays below':>14}")
    for name, found in times.items():
        line = f"{name:13}{crossed[name] / 1e6:9.2f}{1e3 * computing[name]:8.1f}"
        line += "".join(f"{1e3 * found[rate]:13.1f}" for rate in rates)
        if name != "none":
            longer = computing[name] - computing["none"]
            saved = 8 * (crossed["none"] - crossed[name])
            line += f"{saved / longer / 1e6:9.0f} Mb/s" if longer > 0 else f"{'always':>14}"
        print(line)


def main() -> None:
    # Ended by `kill` or `timeout`, it removes its hosts, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["accuracy", "links", "accuracy-job", "links-job"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--rates", nargs="+", default=["none", "1gbit", "100mbit"], help="none first"
    )
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--forms", nargs="*", default=[], help="of compression; default: all")
    options = parser.parse_args()
    if options.what == "accuracy":
        accuracy(options.ranks, options.seeds, options.nets, options.forms)
    elif options.what == "links":
        links(options.rates)
    elif options.what == "accuracy-job":
        accuracy_job(options.seeds, options.nets, options.forms)
    else:
        links_job()


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
