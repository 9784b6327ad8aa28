# SPDX-License-Identifier: Apache-2.0
"""farandole for JAX programs: collectives outside and inside of jit, and optax's optimizers on the
gradients of all ranks. docs/jax.md tells the rules."""

from farandole.installed import needs as _needs

with _needs("jax", "farandole.jax", "JAX", "pip install jax"):
    import jax as _jax  # noqa: F401

from farandole import *  # noqa: F403
from farandole import __all__ as _neutral
from farandole import __version__ as __version__
from farandole.jax.collectives import *  # type: ignore[assignment,no-redef] # noqa: F403
from farandole.jax.compression import Compression
from farandole.jax.equality import ModelVerifier
from farandole.jax.program import typed_errors
from farandole.jax.training import broadcast_parameters, distributed, grad, value_and_grad

__all__ = [
    *_neutral,
    "Compression",
    "ModelVerifier",
    "broadcast_parameters",
    "distributed",
    "grad",
    "typed_errors",
    "value_and_grad",
]


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
