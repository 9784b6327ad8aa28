# SPDX-License-Identifier: Apache-2.0
"""One update of a sharded optimizer: this rank's pieces get their gradients, and when the inner
optimizer has updated them all ranks receive each other's. On the thread that steps."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farandole import Handle, Max, MismatchError, ProcessSet, allgather_object
from farandole.extension import (
    EMPTY,
    Call,
    GpuHandle,
    Op,
    generation,
    leases,
    ranks_text,
    refuse,
    set_id,
)
from farandole.extras.sharded.grad import ShardedGrad
from farandole.extras.sharded.layout import Part, check_alike
from farandole.extras.sharded.sending import Shards
from farandole.torch import allgather, allreduce_
from farandole.torch.extension import device_and_stream, prepare


class Piece:
    """The elements of one parameter that this rank updates: a view of the parameter's memory."""

    def __init__(self, parameter: Tensor, part: Part, name: str) -> None:
        self.parameter = parameter
        self.part = part
        self.name = name
        self._form = (parameter.dtype, parameter.device)
        self._pointer = parameter.data_ptr()
        self._gather: Any = None  # prepared
        self.tensor: Tensor | None = None  # None: no element is this rank's
        if part.parts == 1:
            self.tensor = parameter
        elif part.held:
            self.tensor = torch.nn.Parameter(part.kept(parameter), parameter.requires_grad)

    @property
    def said(self) -> str:
        """Its parameter's form, which is equal on all ranks."""
        p = self.parameter
        return f"{p.dtype} {tuple(p.shape)} with strides {p.stride()}"

    def take(self, state: Any, own: Mapping[Any, Any] | None, whole: bool = True) -> None:
        """Puts its part of the parameter's state into an optimizer's `state`.

        `whole`: `own` is of the whole parameter. Raises ValueError for state that can't be divided.
        """
        if own is not None and whole:
            own = self.part.shorten(own, self.name)
        if own is not None and self.tensor is not None:
            state[self.tensor] = own

    def follow(self) -> None:
        """To be called before an update: `parameter.data` may be other memory by now.

        Raises RuntimeError if its form is another one.
        """
        p = self.parameter
        if (p.dtype, p.device) != self._form or not self.part.fits(p):
            raise RuntimeError(
                f"parameter {self.name} was {self._form[0]} {self.part.shape} on {self._form[1]} "
                f"when the sharded optimizer was made, and is {p.dtype} {tuple(p.shape)} on "
                f"{p.device} with strides {p.stride()}: convert the model (model.half(), "
                "model.to()) before DistributedOptimizer"
            )
        if p.data_ptr() != self._pointer:
            self._pointer = p.data_ptr()
            if self.tensor is not None:
                self.tensor.data = self.part.kept(p)

    def gradient(self) -> Tensor | None:
        """This rank's part of `.grad`, in the form of `tensor`; None: there is no gradient."""
        grad = self.parameter.grad
        if grad is None:
            return None
        if not isinstance(grad, ShardedGrad):  # the user's own
            return self.part.kept(grad)
        return self.part.piece(grad.shard)

    def prepare(self, scope: str, process_set: int) -> None:
        """Makes share() usable; again after shutdown() and init()."""
        call = Call(Op.ALLGATHER, f"{scope}.{self.name}.updated", process_set)
        rows = (int(self.part.count > 0), self.part.elements)
        shape = rows if self.part.whole else (self.part.count,)
        few = torch.empty(0, dtype=self._form[0], device=self._form[1])
        self._gather = prepare(call, few, (None, 1), in_place=False, shape=shape)

    def share(self) -> int:
        """Submits the exchange of all ranks' pieces of the parameter, in place; its handle."""
        p, part = self.parameter, self.part
        assert self._gather is not None
        here = p.data_ptr()
        own = here + part.begin * p.element_size() if part.count else EMPTY
        handle: int = self._gather.submit(own, here or EMPTY, p.untyped_storage())
        return handle


class Update:
    """The pieces of all parameters, and what ranks tell each other about them."""

    def __init__(
        self, pieces: Sequence[Piece], process_set: ProcessSet, shards: Shards | None
    ) -> None:
        """`shards` is None if no other rank takes part."""
        self.pieces = {piece.parameter: piece for piece in pieces}
        self.alone = shards is None
        self._process_set = process_set
        self._shards = shards
        self._generation: object = None

    @property
    def _scope(self) -> str:
        assert self._shards is not None
        return self._shards.scope

    def forget(self) -> None:
        """To be called when gradients are reset."""
        if self._shards is not None:
            self._shards.forget()

    def _start(self) -> None:
        if self._generation == generation():
            return
        assert self._shards is not None
        self._shards.check_place()
        number = set_id(self._process_set)
        for piece in self.pieces.values():
            piece.prepare(self._scope, number)
        self._generation = generation()

    def begin(self) -> list[Piece]:
        """Gives the pieces their gradients; returns those that have one."""
        stepped = []
        try:
            for piece in self.pieces.values():
                piece.follow()
            self._start()
            for piece in self.pieces.values():
                grad = piece.gradient()
                if grad is not None:
                    stepped.append(piece)
                    if piece.tensor is not None:
                        piece.tensor.grad = grad
        except Exception as reason:
            self.refuse(reason)
            raise
        return stepped

    def end(self) -> None:
        """Takes the gradients back; those of the parameters stay."""
        for piece in self.pieces.values():
            if piece.tensor is not None:
                piece.tensor.grad = None

    def refuse(self, reason: BaseException) -> None:
        """Tells the peers that this rank can't update its pieces."""
        told = reason if isinstance(reason, Exception) else RuntimeError(type(reason).__name__)
        refuse(Call(Op.ALLREDUCE, f"{self._scope}.update", set_id(self._process_set)), told)

    def share(self, stepped: Sequence[Piece], groups: Sequence[dict[str, Any]]) -> None:
        """Sends the pieces that were updated to all ranks, and receives theirs; collective.

        Raises MismatchError on all ranks if they have not updated the same, or not alike.
        """
        self._agree(stepped, groups)
        if not stepped:
            return
        handles: list[int] = []
        epoch = leases.epoch()
        try:
            for piece in stepped:
                handles.append(piece.share())
        except BaseException:
            leases.drop(handles, epoch)
            raise
        _waiting(handles, f"{self._scope}: updated parameters", stepped[0].parameter).wait()
        for piece in stepped:
            torch.autograd.graph.increment_version(piece.parameter)

    def _agree(self, stepped: Sequence[Piece], groups: Sequence[dict[str, Any]]) -> None:
        """Raises MismatchError if a rank is missing, or has not stepped as this one has."""
        members = self._process_set.ranks or []
        told = _told(stepped, groups)
        digest = zlib.crc32(repr(told).encode())
        words = torch.zeros(2 + len(members), dtype=torch.int64)
        words[0], words[1], words[2 + (self._process_set.rank() or 0)] = digest, -digest, 1
        name = f"{self._scope}.update"
        allreduce_(words, op=Max, name=name, process_set=self._process_set)
        high, low, *here = words.tolist()
        gone = [rank for rank, came in zip(members, here, strict=True) if came != 1]
        if gone:
            raise MismatchError(
                f"{self._scope}: {ranks_text(gone)} joined (hvd.join()), so nobody updates the "
                "part of the parameters that is kept there: with shard_state=True all ranks make "
                "equally many steps"
            )
        if high == -low:
            return
        everyone = allgather_object(told, name=f"{name}.told", process_set=self._process_set)
        check_alike(everyone, members, self._scope, "have not made the same step")
        raise MismatchError(f"{self._scope}: ranks have not made the same step")

    # ---- gradients

    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient that there is."""
        found = (piece.gradient() for piece in self.pieces.values())
        return [grad for grad in found if grad is not None]

    def norm(self, grads: Sequence[Tensor], norm_type: Any, max_norm: Any) -> Tensor:
        """The norm of all ranks' parts together, float32 or more; collective.

        Raises TypeError or ValueError on all ranks for what is not a number, and for a norm_type
        that is not greater than 0; MismatchError if ranks differ in them.
        """
        name = f"{self._scope}.norm"
        try:
            order, most = float(norm_type), float(max_norm)
            if not order > 0:
                raise ValueError(f"norm_type is {order}: pass a number greater than 0")
        except (TypeError, ValueError) as reason:
            refuse(Call(Op.ALLGATHER, name, set_id(self._process_set)), reason)
            raise
        norms = [torch.linalg.vector_norm(g, order, dtype=_wide(g)) for g in grads if g.numel()]
        like = grads[0] if grads else torch.zeros(())
        own = torch.linalg.vector_norm(
            torch.stack([x.to(like.device, torch.float64) for x in norms])
            if norms
            else torch.zeros(1, dtype=torch.float64, device=like.device),
            order,
        )
        row = torch.stack([own, own.new_tensor(order), own.new_tensor(most)]).reshape(1, 3)
        rows = allgather(row, name=name, process_set=self._process_set)
        terms = [f"max_norm {most} and norm_type {order}" for _, order, most in rows.tolist()]
        for rank, other in enumerate(terms):
            if other != terms[0]:
                raise MismatchError(
                    f"clip_grad_norm_: rank 0 clips with {terms[0]}, rank {rank} with {other}: "
                    "give all ranks the same"
                )
        total: Tensor = torch.linalg.vector_norm(rows[:, 0], order).to(_wide(like))
        return total

    # ---- state

    def whole_state(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The full state by parameters, from all ranks' pieces; collective.

        Raises MismatchError on all ranks if they have different state.
        """
        self._start()
        name = f"{self._scope}.state_dict"
        first = self._process_set.rank() == 0
        told = []
        for piece in self.pieces.values():
            own = {} if piece.tensor is None else state.get(piece.tensor, {})
            divided = {k: v.dtype for k, v in own.items() if piece.part.divides(v)}
            told.append(
                (divided, {k: v for k, v in own.items() if k not in divided} if first else {})
            )
        everyone = allgather_object(told, name=name, process_set=self._process_set)
        members = self._process_set.ranks or []
        whole: dict[Any, Any] = {k: v for k, v in state.items() if not isinstance(k, Tensor)}
        for number, piece in enumerate(self.pieces.values()):
            divided, others = everyone[0][number]
            for rank, theirs in zip(members, everyone, strict=True):
                if theirs[number][0] != divided:
                    raise MismatchError(
                        f"{name}: ranks {members[0]} and {rank} have different state of "
                        f"{piece.name}: {divided}, and {theirs[number][0]}"
                    )
            if divided or others:
                own = state.get(piece.tensor, {})
                whole[piece.parameter] = dict(others)
                for key in divided:
                    whole[piece.parameter][key] = piece.part.formed(
                        allgather(
                            own[key],
                            name=f"{name}.{piece.name}.{key}",
                            process_set=self._process_set,
                        )
                    )
        return whole


def _told(stepped: Sequence[Piece], groups: Sequence[dict[str, Any]]) -> list[str]:
    """What is equal on all ranks of a step, as text: options, and the parameters with gradients."""
    kinds = (bool, int, float, str, tuple)
    told = []
    for i, group in enumerate(groups):
        options = (f"{k}: {v!r}" for k, v in group.items() if isinstance(v, kinds))
        told.append(f"group {i} has {', '.join(options)}")
    return [*told, f"gradients of {', '.join(piece.name for piece in stepped)}"]


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of a norm: its own, or float32 for what is shorter."""
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32


def _stream(device: torch.device) -> int:
    return device_and_stream(device)[1]


def _waiting(handles: Sequence[int], what: str, like: Tensor) -> Handle[None]:
    """A handle for several of the core, of tensors such as `like`."""
    numbers = leases.numbers_of(handles)
    if like.is_cuda:
        return GpuHandle(numbers, lambda _: None, what, None, partial(_stream, like.device))
    return Handle(numbers, lambda _: None, what)
