# SPDX-License-Identifier: Apache-2.0
"""allreduce of sparse tensors. It gathers all ranks' elements, then each rank adds them up.

May be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farandole import ops
from farandole.calls.arguments import divisor_of, shown
from farandole.calls.public_call import collective
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import Average, Sum
from farandole.torch.kind import check_unused
from farandole.torch.strides import sparse_sum

# The name of the collective, and the default for the argument `name`.
_FIRST, _UNNAMED = "{}.indices", "sparse_allreduce"


def elements_of(x: Tensor) -> list[Tensor]:
    """Returns the tensors that a rank sends for a sparse COO tensor: shape, indices and values."""
    check_unused(x)
    own = x.detach().coalesce()
    shape = torch.tensor([own.shape], device=own.device)
    return [shape, own.indices().t().contiguous(), own.values().contiguous()]


def sum_of(indices: Tensor, values: Tensor, like: Tensor, divisor: int, name: str | None) -> Tensor:
    """Returns the sum of all ranks' elements, divided by `divisor`.

    The result is a coalesced sparse tensor with the shape of `like`. An average of integers is an
    integer, rounded towards zero, as of dense tensors.
    """
    dtype = values.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return sparse_sum(
            indices.t(), values if divisor == 1 else values / divisor, like.shape, name
        )
    total = sparse_sum(indices.t(), values.to(torch.int64), like.shape, name)
    return total.div_(divisor, rounding_mode="trunc").to(dtype)


@collective(Op.ALLGATHER, _FIRST, unnamed=_FIRST.format(_UNNAMED))
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Callable[[], Tensor]:
    """Computes the sum or average of sparse COO tensors that have the same shape on all ranks.

    A rank's tensor may have no elements. Gathers the elements of all ranks. Returns a function that
    waits and then returns a coalesced sparse tensor.

    - tensor: a sparse COO tensor on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - op: Average or Sum.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.
    ValueError is raised on all ranks if one rank passes a dense tensor or an unsupported operation,
    or if shapes differ.

    Examples:
        >>> wait = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "embedding", hvd.Sum)
        >>> wait().to_dense()
        tensor([[1., 0.],
                [0., 1.]])
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        layout = getattr(tensor, "layout", type(tensor).__name__)
        raise ValueError(
            f"tensor is a {layout}: pass a sparse COO tensor (to_sparse()), or call allreduce"
        )
    if op not in (Average, Sum):
        raise ValueError(f"op is {shown(op)}: sparse tensors can be summed or averaged only")
    name = _UNNAMED if name is None else name
    mine = elements_of(tensor)
    divisor = divisor_of(op, set_id(process_set))
    gathered = ops.grouped_allgather_async(mine, _FIRST.format(name), process_set, timeout=timeout)

    def wait() -> Tensor:
        forms, indices, values = gathered.wait()
        if not forms.eq(mine[0]).all():  # an index may be out of range for a smaller tensor
            raise ValueError(
                f"sparse_allreduce_async {name!r}: ranks have different shapes, by rank "
                f"{[tuple(shape) for shape in forms.tolist()]}"
            )
        return sum_of(indices, values, tensor, divisor, name)

    return wait
