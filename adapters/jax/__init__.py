# SPDX-License-Identifier: Apache-2.0
"""farandole for JAX programs: collectives outside and inside of jit, and optax's optimizers on the
gradients of all ranks. docs/jax.md tells the rules."""

from farandole import *  # noqa: F403
from farandole import __all__ as _neutral
from farandole import __version__ as __version__
from farandole.jax import collectives
from farandole.jax.collectives import allgather, allreduce, broadcast, reducescatter
from farandole.jax.collectives import scatter as scatter
from farandole.jax.compression import Compression
from farandole.jax.program import typed_errors
from farandole.jax.training import broadcast_parameters, distributed, grad, value_and_grad

alltoall = collectives.alltoall
# A list is a pytree.
grouped_allgather = allgather  # type: ignore[assignment]
grouped_allreduce = allreduce  # type: ignore[assignment]
grouped_broadcast = broadcast  # type: ignore[assignment]
grouped_reducescatter = reducescatter  # type: ignore[assignment]

__all__ = [
    *_neutral,
    "Compression",
    "broadcast_parameters",
    "distributed",
    "grad",
    "typed_errors",
    "value_and_grad",
]


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
