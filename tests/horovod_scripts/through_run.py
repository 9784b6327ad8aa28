# SPDX-License-Identifier: Apache-2.0
"""A script that starts itself: main() on several ranks through horovod.run, by the older names of
its arguments, or alone. Its function lives in __main__, and takes the parsed arguments."""

import argparse

import horovod
import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--num-proc", type=int)
parser.add_argument("--hosts")
parser.add_argument("--communication")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def main(args):
    def metric_average(value, name):
        return hvd.allreduce(torch.tensor(value), name=name).item()

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Average
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), hvd.rank() + 1.0)).square().sum().backward()
        optimizer.step()
    total = float(sum(p.sum() for p in model.parameters()))
    assert abs(metric_average(total, "total") - total) < 1e-6
    return hvd.rank(), hvd.size(), args.communication, total


if __name__ == "__main__":
    args = parser.parse_args()
    if args.num_proc:
        results = horovod.run(
            main,
            args=(args,),
            np=args.num_proc,
            hosts=args.hosts,
            use_gloo=args.communication == "gloo",
            use_mpi=args.communication == "mpi",
        )
        assert len({total for *_, total in results}) == 1
        print("results:", [place for *place, _ in results])
    else:
        print("alone:", main(args)[:2])
