# SPDX-License-Identifier: Apache-2.0
"""Describes the model of a DistributedOptimizer, so that ranks can compare their models.

The description has fingerprints of the parameters, and the numbers in the groups' settings and in
the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from farandole.equality import (
    ModelSummary,
    Remedies,
    StandaloneModelCheck,
    VerifyPolicy,
    fingerprint,
)
from farandole.members import ProcessSet
from farandole.torch.kind import address_of

_BROADCAST = "broadcast_parameters(model.state_dict(), root_rank="
REMEDIES = Remedies(
    f"call {_BROADCAST}0)",
    f"call {_BROADCAST}last) and broadcast_optimizer_state(optimizer, root_rank=last)",
    "load the same checkpoint on all ranks, or call broadcast_optimizer_state(optimizer, "
    "root_rank=0)",
)
# Settings that change how a step is computed, but not the step's result. torch may choose different
# values on different devices.
_MEANS = {"params", "foreach", "fused", "capturable", "differentiable"}


@torch.no_grad()
def model_of(
    named: Sequence[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None
) -> ModelSummary:
    """Describes the parameters and the optimizer as they are now."""
    groups = [] if optimizer is None else optimizer.param_groups
    settings = {
        f"{key} of group {number}": text
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key not in _MEANS and (text := _text(value))
    }
    held: Any = {} if optimizer is None else optimizer.state
    state = {name: _state(held[x]) if x in held else "none" for name, x in named}
    return ModelSummary({name: fingerprint_of_tensor(x) for name, x in named}, settings, state)


def comparison(
    optimizer: torch.optim.Optimizer,
    named: Callable[[torch.optim.Optimizer], Sequence[tuple[str, Tensor]]],
    process_set: ProcessSet,
    interval: VerifyPolicy,
) -> Callable[[], None]:
    """Returns a function that compares the ranks' models. Call that function before each step.

    The function holds a weak reference to `optimizer`.
    """
    whose = ref(optimizer)

    def describe() -> ModelSummary:
        own = whose()
        assert own is not None  # the optimizer calls this from step()
        model = model_of(named(own), own)
        return model._replace(state={})  # the state depends on this rank's gradients

    return StandaloneModelCheck("model", describe, process_set, interval, REMEDIES).before_step


def _state(held: Any) -> str:
    """Returns the names and numbers in one parameter's state, such as "exp_avg, step 3.0"."""
    if not isinstance(held, Mapping):
        return ""
    found = {
        str(key): "" if isinstance(value, Tensor) and value.dim() else _text(value)
        for key, value in held.items()
        if value is not None
    }
    return ", ".join(f"{key} {text}".rstrip() for key, text in sorted(found.items())) or "none"


def _text(value: Any) -> str:
    """Returns a number or a tuple of numbers as text.

    Returns "" for other values, because they may differ between ranks.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (tuple, list)):
        texts = [_text(member) for member in value]
        return f"({', '.join(texts)})" if all(texts) else ""
    if isinstance(value, (bool, int, float)):
        return repr(float(value)) if isinstance(value, float) else repr(value)
    return ""


def fingerprint_of_tensor(x: Tensor) -> str:
    """Returns a fingerprint of dtype, shape and elements, or "" if the elements cannot be read.

    If the tensor is on a GPU, waits for the stream and copies the tensor to the CPU.
    """
    try:
        if x.is_meta or x.is_nested:
            return ""
        kind = f"{x.dtype}{tuple(x.shape)}"
        return " ".join([kind, *map(_of_memory, _parts(x.detach()))])
    except (RuntimeError, TypeError, ValueError):  # freed by FSDP, a wrapper, or uninitialised
        return ""


def _parts(x: Tensor) -> list[Tensor]:
    """Returns dense tensors that hold the elements of `x`. Raises TypeError for other layouts."""
    if x.layout is torch.strided:
        return [x]
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return [x.indices(), x.values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    raise TypeError(f"a tensor of layout {x.layout}")


def _of_memory(x: Tensor) -> str:
    address_of(x)
    whole = x.resolve_conj().resolve_neg().cpu().contiguous()
    return fingerprint(address_of(whole), whole.nbytes)
