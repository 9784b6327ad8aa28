# SPDX-License-Identifier: Apache-2.0
"""NaN in a gradient is named; without MPI (fork launcher)."""

NAN = """
import torch, farandole.torch as hvd

hvd.init()
p = torch.nn.Parameter(torch.zeros(3000))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), named_parameters=[("weight", p)])
(p * (float("nan") if hvd.rank() == 1 else 1.0)).sum().backward()
optimizer.step()
print("the parameters hold NaN:", p.isnan().any().item())
"""


def test_nan_in_a_gradient_is_named_before_it_spreads(fork_ranks):
    results = fork_ranks(NAN, 2, {"FARANDOLE_CHECK_NUMERICS": "1"}).finish()
    for result in results:
        assert result.returncode != 0
        assert "weight': the input of rank 1 holds NaN" in result.out
        assert "the parameters hold" not in result.out
