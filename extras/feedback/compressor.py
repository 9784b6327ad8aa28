# SPDX-License-Identifier: Apache-2.0
"""What a compressor with error feedback is. Users may write their own; Feedback, in
encoding.py, carries its calls out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import NamedTuple

from torch import Tensor

from farandole import Average, Sum
from farandole.extension import Call, Op
from farandole.torch.extension import Sender, Sending


class Ask(NamedTuple):
    """A call that a compressor wants made."""

    op: Op
    tensor: Tensor  # contiguous


State = dict[str, Tensor]
RESIDUAL = "residual"  # its key in a State
Steps = Generator[Ask, Tensor, tuple[Tensor, Tensor]]


class FeedbackCompressor(Sender):
    """A lossy way to sum gradients over the ranks; what it loses is added to the next gradient.

    A subclass writes `reduce`. One object serves any number of parameters: it holds settings only.
    The residual, what was lost so far, belongs to the optimizer, one per parameter and rank. Goes
    with DistributedOptimizer only.

    Examples:
        >>> class Signs(hvd.FeedbackCompressor):  # one byte for each element
        ...     def reduce(self, tensor, state, ranks, rank):
        ...         scale = yield self.allreduce(tensor.abs().mean().reshape(1))
        ...         signs = tensor.sign().to(torch.int8)
        ...         total = yield self.allreduce(signs)
        ...         return total * scale / ranks, signs * scale / ranks
    """

    smallest = 4096  # elements; a parameter with fewer is sent uncompressed

    def takes(self, parameter: Tensor) -> bool:
        """Whether it compresses this parameter's gradients; equal on all ranks."""
        return parameter.numel() >= self.smallest

    def check(self, name: str, op: int, views: bool, grouped: bool) -> None:
        """Raises ValueError if the compressor can't be used for this parameter.

        `op` must be Average or Sum; neither `views` (gradient_as_bucket_view) nor `grouped`
        (groups) may be set.
        """
        if op not in (Average, Sum):
            raise ValueError(
                f"parameter {name}: {self!r} works with op=Average and Sum only: what it has lost "
                "of one gradient is added to the next, which is right for sums"
            )
        if views or grouped:
            what = "gradient_as_bucket_view" if views else "groups"
            raise ValueError(
                f"parameter {name}: {self!r} does not work with {what}: what is sent is not the "
                "gradient itself; let compression= choose Compression.none for it"
            )

    def sending(self, call: Call, parameter: Tensor, state: State) -> Sending:
        """What sends the gradients of one parameter by this compressor; farandole calls it."""
        from farandole.extras.feedback.sending import Feedback  # it uses this module

        return Feedback(call, self, state, parameter)

    @abstractmethod
    def reduce(self, tensor: Tensor, state: State, ranks: int, rank: int) -> Steps:
        """A generator: yields the calls it needs, gets their results, and returns two tensors.

        Arguments:
            tensor: this rank's gradient plus its residual, contiguous, float32 (float64 for a
                float64 gradient). Not to be written. Zeros on a rank without a gradient, whose
                first call sends nothing.
            state: tensors kept from step to step in addition to the residual; set entries, and do
                not write into the old tensors. They are kept only if the result is finite.
            ranks: how many ranks reduce.
            rank: this rank's number among them.

        All ranks make the same calls with tensors of equal shape and dtype. Returns (the sum over
        the ranks, the part of `tensor` that this rank has put into it), both of the shape of
        `tensor`. The first must have the same bits on all ranks; `tensor` minus the second is the
        new residual. It may be run again from its start with the same results.
        """

    @staticmethod
    def allreduce(tensor: Tensor) -> Ask:
        """To yield: the sum of all ranks' tensors."""
        return Ask(Op.ALLREDUCE, tensor.clone().contiguous())  # the result is put in its place

    @staticmethod
    def allgather(tensor: Tensor) -> Ask:
        """To yield: all ranks' tensors, stacked in rank order; those that send nothing are left
        out."""
        return Ask(Op.ALLGATHER, tensor.unsqueeze(0).contiguous())

    @staticmethod
    def alltoall(tensor: Tensor) -> Ask:
        """To yield: row r of a tensor with one row for each rank goes to rank r; gives the rows
        sent to this rank, in rank order, without those of ranks that send nothing."""
        return Ask(Op.ALLTOALL, tensor.contiguous())
