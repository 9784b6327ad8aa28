# SPDX-License-Identifier: Apache-2.0
"""farandole for JAX: collectives outside and within jit, and optax optimizers.

The optimizers reduce the gradients of all ranks. docs/jax.md has the rules.
"""

from farandole.installed import needs as _needs

with _needs("jax", "farandole.jax", "JAX", "pip install jax"):
    import jax as _jax  # noqa: F401

from farandole import shared as _shared
from farandole.arrays.arena import empty
from farandole.jax.collectives import *  # noqa: F403
from farandole.jax.compression import Compression
from farandole.jax.program import typed_errors
from farandole.jax.training import broadcast_parameters, distributed, grad, value_and_grad
from farandole.ops import alltoall_async, barrier
from farandole.shared import *  # noqa: F403
from farandole.shared import __all__ as __all__  # mypy reads this list, Python the one below

__all__ = [  # noqa: F811
    *_shared.__all__,
    "Compression",
    "allgather",  # noqa: F405
    "allreduce",  # noqa: F405
    "alltoall",  # noqa: F405
    "alltoall_async",
    "barrier",
    "broadcast",  # noqa: F405
    "broadcast_parameters",
    "distributed",
    "empty",
    "grad",
    "grouped_allgather",  # noqa: F405
    "grouped_allreduce",  # noqa: F405
    "grouped_reducescatter",  # noqa: F405
    "reducescatter",  # noqa: F405
    "typed_errors",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return sorted(__all__)
