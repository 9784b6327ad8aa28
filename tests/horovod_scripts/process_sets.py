# SPDX-License-Identifier: Apache-2.0
"""Two process sets, static ones and a dynamic one; each half of the ranks trains its own model."""

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import global_process_set
from mpi4py import MPI

world_size = MPI.COMM_WORLD.size
even_set = hvd.ProcessSet(range(0, world_size, 2))
odd_set = hvd.ProcessSet(range(1, world_size, 2))
hvd.init(process_sets=[even_set, odd_set])
torch.set_num_threads(1)

mine = even_set if even_set.included() else odd_set
for process_set in (hvd.global_process_set, even_set, odd_set):
    print(f"rank {hvd.rank()}: {process_set}")
assert hvd.global_process_set is global_process_set
assert even_set.process_set_id != odd_set.process_set_id

x = torch.full((4,), float(hvd.rank()))
total = hvd.allreduce(x, op=hvd.Sum, name="in my set", process_set=mine)
assert total.tolist() == [float(sum(mine.ranks))] * 4

root = mine.ranks[-1]
assert hvd.broadcast(x, root_rank=root, process_set=mine).tolist() == [float(root)] * 4

model = torch.nn.Linear(3, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01),
    named_parameters=model.named_parameters(),
    process_set=mine,
)
for step in range(4):
    optimizer.zero_grad()
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(step + 10 * hvd.rank()))
    (model(data) - mine.ranks[0]).pow(2).mean().backward()
    optimizer.step()
weights = hvd.allgather(model.weight.detach(), name="all weights")
halves = [weights[0::2], weights[1::2]]
assert all(torch.equal(row, half[0]) for half in halves for row in half)
assert not torch.equal(halves[0][0], halves[1][0])

dynamic = hvd.add_process_set([0, 1])
if dynamic.included():
    gathered = hvd.allgather(torch.tensor([hvd.rank()]), process_set=dynamic)
    assert gathered.tolist() == [0, 1]
hvd.barrier()
assert hvd.remove_process_set(dynamic)

try:
    hvd.allreduce(torch.ones(2 + hvd.rank()), name="wrong shape")
except HorovodInternalError as error:
    assert "wrong shape" in str(error)  # noqa: PT017
    print(f"process sets done on rank {hvd.rank()}")
else:
    raise AssertionError("no error")
