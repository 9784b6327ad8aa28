# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks train the same pytree of parameters, compared every so many steps. For users,
on the thread that calls their steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp

from farandole.equality import Comparison, Interval, Model, Remedies, fingerprint_of
from farandole.jax.training import Accumulated
from farandole.members import ProcessSet, global_process_set

_REMEDIES = Remedies(
    "params = broadcast_parameters(params, root_rank=0)",
    "params, state = broadcast_parameters((params, state), root_rank=last)",
    "",  # its numbers are told as settings
)
_NUMBERS = "biufcV"  # kinds of dtypes; V: bfloat16, float8 and their kind


class ModelVerifier:
    """Compares the ranks' parameters and optimizer states, bit by bit.

    Make one on all ranks after init(), and call it before each step, outside of jit. The first call
    and then one in `verify_every` are collective; the others only count.

    - verify_every: calls from one comparison to the next; 0: none. Default: FARANDOLE_VERIFY_EVERY,
      1,000. If ranks give different numbers, the smallest except 0 holds.
    - verify: 'warn' once where ranks differ, or 'raise' MismatchError on all ranks.
    - process_set: the ranks that train together; on others a call does nothing.

    Examples:
        >>> verifier = hvd.ModelVerifier(verify="raise")
        >>> params = {"w": jnp.ones(2)}
        >>> for _ in range(3):
        ...     verifier(params)
    """

    def __init__(
        self,
        verify_every: int | None = None,
        verify: Literal["warn", "raise"] = "warn",
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._trees: tuple[Any, Any] = (None, None)
        interval = Interval.of(verify_every, verify)
        self._comparison = Comparison("model", self._describe, process_set, interval, _REMEDIES)

    def __call__(self, params: Any, state: Any = None) -> None:
        """Warns if the ranks' pytrees differ, or raises MismatchError.

        `params`: arrays; `state`: the optimizer's, None to leave it out. Numbers in it count as
        settings: optax.inject_hyperparams puts the learning rate there. Keys of jax.random, and
        arrays that lie on devices of other processes too, are left out. When it compares, it waits
        for the arrays. It then raises TypeError on all ranks within jit, and for leaves that are
        neither arrays nor numbers.
        """
        self._trees = params, state
        try:
            self._comparison.before_step()
        finally:
            self._trees = None, None

    def _describe(self) -> Model:
        params, state = self._trees
        arrays = {name: fingerprint_of(x) if x is not None else "" for name, x in _leaves(params)}
        settings = {}
        for name, x in _leaves(_shared(state), "state"):
            if x is None:
                continue
            if x.ndim == 0:
                settings[name] = str(x)
            else:
                arrays[name] = fingerprint_of(x)
        return Model(arrays, settings, {})


def _shared(state: Any) -> Any:
    """An optimizer's state without sums of gradients that wait to be reduced: they are local."""

    def shared(x: Any) -> Any:
        return (x.inner, x.passes) if isinstance(x, Accumulated) else x

    return jax.tree.map(shared, state, is_leaf=lambda x: isinstance(x, Accumulated))


def _leaves(tree: Any, root: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any] | None]]:
    """(path, values) of leaves; None: they are not to be compared."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = f"{root}{jax.tree_util.keystr(path)}" or "params"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"ModelVerifier compares values: call it outside of jit, with {name}")
        if isinstance(leaf, jax.Array) and (
            jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not leaf.is_fully_addressable
        ):
            yield name, None
            continue
        values = np.asarray(leaf)
        if values.dtype.kind not in _NUMBERS or values.dtype.hasobject:
            raise TypeError(f"ModelVerifier: {name} is of type {type(leaf).__name__}, not an array")
        yield name, values
