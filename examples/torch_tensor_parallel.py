# SPDX-License-Identifier: Apache-2.0
"""Splits the layers of a small transformer over the ranks: tensor parallelism on CPUs.

    mpirun -np 2 python examples/torch_tensor_parallel.py    # or -np 4
    torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py

Every rank holds a part of each layer's weights and computes a part of the same token; two small
allreduces per layer add the parts. Expected on 1, 2 or 4 ranks:
    8 layers, each rank holds 1/2 of their weights
    the outputs equal those of the whole model: yes
    32 tokens, 16 allreduces each: ... ms a token
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import farandole.torch  # noqa: F401 (knows the backend)

WIDTH, HEADS, LAYERS, TOKENS = 256, 4, 8, 32
COLUMNS, ROWS = ColwiseParallel, RowwiseParallel


class Layer(nn.Module):
    """Attention over all tokens so far, then two linear maps. Keeps the tokens' keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.past: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Processes one token, of shape (1, WIDTH)."""
        y = self.norms[0](x)
        head = WIDTH // HEADS  # heads are split, so a rank has only some of them
        q, k, v = (f(y).view(-1, 1, head) for f in (self.queries, self.keys, self.values))
        self.past.append((k, v))
        keys, values = (torch.cat(list(part), 1) for part in zip(*self.past, strict=True))
        seen = nn.functional.scaled_dot_product_attention(q, keys, values)
        x = x + self.mix(seen.reshape(1, -1))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).eval()


@torch.no_grad()
def generate(model: nn.Module) -> tuple[Tensor, float]:
    """Uses each output as the next input. Returns the outputs and the seconds per token."""
    x = torch.linspace(-1, 1, WIDTH).view(1, -1)
    outputs = []
    began = time.perf_counter()
    for _ in range(TOKENS):
        x = torch.tanh(model(x))
        outputs.append(x)
    return torch.cat(outputs), (time.perf_counter() - began) / TOKENS


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, ParallelStyle] = {
        **dict.fromkeys(("queries", "keys", "values", "wide"), COLUMNS()),
        **dict.fromkeys(("mix", "narrow"), ROWS()),
    }
    model = make()
    for layer in model:
        parallelize_module(layer, mesh, plan)
    outputs, seconds = generate(model)
    expected, _ = generate(make())
    same = torch.allclose(outputs, expected, atol=1e-4)
    if dist.get_rank() == 0:
        size = dist.get_world_size()
        print(f"{LAYERS} layers, each rank holds 1/{size} of their weights")
        print(f"the outputs equal those of the whole model: {'yes' if same else 'no'}")
        print(f"{TOKENS} tokens, {2 * LAYERS} allreduces each: {1000 * seconds:.1f} ms a token")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
