# SPDX-License-Identifier: Apache-2.0
"""What ranks compare of a DistributedOptimizer: its parameters' bytes, and the numbers among its
groups' settings and in its state. On the thread that closes a round, or steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from farandole.equality import Comparison, Interval, Model, Remedies, fingerprint
from farandole.members import ProcessSet
from farandole.torch.kind import address_of

_BROADCAST = "broadcast_parameters(model.state_dict(), root_rank="
REMEDIES = Remedies(
    f"call {_BROADCAST}0)",
    f"call {_BROADCAST}last) and broadcast_optimizer_state(optimizer, root_rank=last)",
    "load the same checkpoint on all ranks, or call broadcast_optimizer_state(optimizer, "
    "root_rank=0)",
)
# How a step is computed, not what it computes; torch chooses by the device.
_MEANS = {"params", "foreach", "fused", "capturable", "differentiable"}


@torch.no_grad()
def model_of(named: Sequence[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None) -> Model:
    """These parameters and this optimizer, as they are now."""
    groups = [] if optimizer is None else optimizer.param_groups
    settings = {
        f"{key} of group {number}": text
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key not in _MEANS and (text := _text(value))
    }
    held: Any = {} if optimizer is None else optimizer.state
    state = {name: _state(held[x]) if x in held else "none" for name, x in named}
    return Model({name: fingerprint_of_tensor(x) for name, x in named}, settings, state)


def comparison(
    optimizer: torch.optim.Optimizer,
    named: Callable[[torch.optim.Optimizer], Sequence[tuple[str, Tensor]]],
    process_set: ProcessSet,
    interval: Interval,
) -> Callable[[], None]:
    """What compares the ranks' models if called before each step; does not keep `optimizer`."""
    whose = ref(optimizer)

    def describe() -> Model:
        own = whose()
        assert own is not None  # it steps
        return model_of(named(own), own)._replace(state={})  # it is made of local gradients

    return Comparison("model", describe, process_set, interval, REMEDIES).before_step


def _state(held: Any) -> str:
    """What an optimizer has for a parameter, with its numbers: "exp_avg, step 3.0"."""
    if not isinstance(held, Mapping):
        return ""
    found = {
        str(key): "" if isinstance(value, Tensor) and value.dim() else _text(value)
        for key, value in held.items()
        if value is not None
    }
    return ", ".join(f"{key} {text}".rstrip() for key, text in sorted(found.items())) or "none"


def _text(value: Any) -> str:
    """A number, or a tuple of numbers, as text; "" for all else, which may differ."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (tuple, list)):
        texts = [_text(member) for member in value]
        return f"({', '.join(texts)})" if all(texts) else ""
    if isinstance(value, (bool, int, float)):
        return repr(float(value)) if isinstance(value, float) else repr(value)
    return ""


def fingerprint_of_tensor(x: Tensor) -> str:
    """Of the elements in their order; "" for a tensor that holds none itself.

    A tensor on a GPU is copied, and the stream is waited for.
    """
    try:
        if x.is_meta or x.is_nested:
            return ""
        kind = f"{x.dtype}{tuple(x.shape)}"
        return " ".join([kind, *map(_of_memory, _parts(x.detach()))])
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # given away, as FSDP does; a wrapper; not made yet
        return ""


def _parts(x: Tensor) -> list[Tensor]:
    """Dense tensors that hold what `x` does. TypeError for a layout that is not known."""
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
