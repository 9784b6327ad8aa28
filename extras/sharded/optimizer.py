# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(shard_state=True): each rank updates a part of every parameter, whose state
it alone keeps. For optimizer.py; on the thread that steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole import ProcessSet, allgather_object
from farandole.extras.sharded.layout import LAYOUT, MEETING, Part, check_alike, layout_of
from farandole.extras.sharded.sending import Shard, Shards
from farandole.extras.sharded.update import Piece, Update
from farandole.torch import Compression, ReducingOptimizer
from farandole.torch.extension import without_grad

# torch's optimizers that update each element by itself, whatever their options.
_ELEMENTWISE = {
    *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam),
    *(torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
}


class Division:
    """How an optimizer's parameters are divided: made on each rank by itself, then agreed upon."""

    MEETING = MEETING

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        compressor_of: Callable[[str, Tensor], Any],
        process_set: ProcessSet,
        vouched: bool,
    ) -> None:
        """`vouched`: the user says that the optimizer is elementwise.

        Raises ValueError if it is not known to be, or if a parameter can't be divided.
        """
        self.kind = ShardedOptimizer
        self._optimizer = optimizer
        self._process_set = process_set
        inside = bool(process_set.included())
        place = (process_set.rank() or 0, process_set.size() or 1) if inside else (0, 1)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check_apart(parameters, names)
        self._pieces = []
        for parameter, name in zip(parameters, names, strict=True):
            compressor = compressor_of(name, parameter)
            if compressor not in (Compression.none, Compression.fp16, Compression.bf16):
                raise ValueError(
                    f"shard_state does not work with compression {compressor!r}: it takes "
                    "Compression.none, fp16 and bf16, which change each element by itself"
                )
            try:
                self._pieces.append(Piece(parameter, Part.of(parameter, *place), name))
            except ValueError as reason:
                raise ValueError(f"shard_state: parameter {name}: {reason}") from None
        if not (vouched or type(optimizer) in _ELEMENTWISE):
            raise ValueError(
                f"shard_state: {type(optimizer).__name__} is not known to update each element by "
                "itself, so no rank can update a part of a parameter. Leave shard_state out; or "
                "pass shard_state='elementwise' if you know that it does"
            )
        self._compressor_of = compressor_of
        self._shards: Shards | None = None

    def meet(self) -> Callable[..., Any]:
        """Agrees with the other ranks; collective. Returns a Reducer's Maker, after one argument.

        Raises MismatchError on all ranks if they have different optimizers.
        """
        own = [f"{type(self._optimizer).__name__} of {len(self._pieces)} parameters"]
        own += [f"groups of {[len(g['params']) for g in self._optimizer.param_groups]}"]
        own += [f"{piece.name}, {piece.said}" for piece in self._pieces]
        told = allgather_object(own, name=MEETING, process_set=self._process_set)
        remedy = "; build model and optimizer alike on all ranks"
        ranks = self._process_set.ranks or [0]
        check_alike(told, ranks, MEETING, "make different ones", remedy)
        shards = [Shard(piece.parameter, piece.part) for piece in self._pieces]
        self._shards = Shards(self._process_set, self._compressor_of, shards)
        weakref.finalize(self._optimizer, self._shards.unwatch).atexit = False
        return self._shards.sending

    def begin(self) -> Update:
        """Gives each piece its part of the state that the optimizer has by now."""
        state = self._optimizer.state
        if self._shards is not None:
            for piece in self._pieces:
                piece.take(state, state.pop(piece.parameter, None))
        return Update(self._pieces, self._process_set, self._shards)


_LATE = (
    "has come into the optimizer's groups after DistributedOptimizer(shard_state=True) divided "
    "them: give the optimizer all parameters before; frozen ones may be among them"
)


def _check_apart(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    ends = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for p, name in zip(parameters, names, strict=True)
        if p.numel()
    )
    for (_, end, one), (begin, _, other) in pairwise(ends):
        if begin < end:
            raise ValueError(
                f"shard_state: {one} and {other} share memory: make them one parameter, as tied "
                "weights are (b.weight = a.weight)"
            )


class ShardedOptimizer(ReducingOptimizer[Any]):
    """What DistributedOptimizer(shard_state=True) makes of an optimizer.

    `param_groups` holds the whole parameters, for schedulers and for you. `state` is by pieces: it
    is read and written by the methods for state_dicts.
    """

    _update: Update

    @property
    def state_is_divided(self) -> bool:
        """Whether each rank has a part of its state only."""
        return not self._update.alone

    def _step_alone(self, *args: Any, **kwargs: Any) -> Any:
        closure = kwargs.get("closure")
        if callable(closure):  # before the parameters are replaced by pieces
            with torch.enable_grad():
                loss = closure()
            kwargs["closure"] = lambda: loss
        if self._update.alone:
            return super()._step_alone(*args, **kwargs)
        stepped = self._update.begin()
        try:
            with self._in_pieces():
                result = super()._step_alone(*args, **kwargs)
        except BaseException as reason:
            self._update.refuse(reason)
            raise
        finally:
            self._update.end()
        self._update.share(stepped, self.param_groups)
        return result

    @contextmanager
    def _in_pieces(self) -> Iterator[None]:
        """The parameter groups hold this rank's pieces meanwhile."""
        held = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, whole in held:
                tensors = [self._piece(p).tensor for p in whole]
                group["params"] = [tensor for tensor in tensors if tensor is not None]
            yield
        finally:
            for group, whole in held:
                group["params"] = whole

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **_: Any
    ) -> Tensor:
        """Reduces the gradients, scales them to a total norm of `max_norm` at most, returns it.

        The norm is that of the whole gradients, over all ranks. Arguments as in
        torch.nn.utils.clip_grad_norm_; norm_type is greater than 0. Collective. Raises on all ranks
        RuntimeError if the norm is not finite, with error_if_nonfinite, and MismatchError if they
        differ in max_norm or norm_type.
        """
        if self._update.alone:
            return super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self.synchronize()
        kept = self._update.gradients()
        norm = self._update.norm(kept, norm_type, max_norm)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the total norm of the gradients is {norm.item()}")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        _scale(kept, factor)
        return norm

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which step() reduces nothing. ValueError if gradients are not reduced yet.

        Else each part would be updated by one rank's gradients.
        """
        if not (self._update.alone or self._complete()):
            raise ValueError("shard_state: call synchronize() before skip_synchronize()")
        with super().skip_synchronize():
            yield

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Resets the gradients, and what is set aside of them."""
        super().zero_grad(*args, **kwargs)
        self._update.forget()

    # ---- state

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, and how it was divided; no communication.

        As state_dict(), but tensors of the state have this rank's elements only, in one dimension;
        they are the optimizer's own, not copies. "layout" tells part, number of parts, shapes and
        strides, in numbers. For load_state_dict() on the same rank of as many ranks; all ranks'
        parts together are for merge_sharded_state_dicts().
        """
        parts = [piece.part for piece in self._pieces()]
        with self._state_by_parameter(self._held()):
            return {**super().state_dict(), LAYOUT: layout_of(parts)}

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the plain optimizer's, in new tensors on every rank; collective.

        All ranks call it, also if one alone saves. sharded_state_dict() takes no communication, and
        1 / size() of the memory.
        """
        if self._update.alone:
            return super().state_dict()
        with self._state_by_parameter(self._update.whole_state(self.state)):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a full state, of which this rank keeps its part, or this rank's own part.

        A full one comes from state_dict() of any optimizer of this class, sharded or not, or from
        merge_sharded_state_dicts(). No communication: all ranks load the same. Raises ValueError
        for another rank's part, or that of a different number of ranks, or of another model.
        """
        state_dict = dict(state_dict)
        layout = state_dict.pop(LAYOUT, None)
        pieces = self._pieces()
        own = layout_of([piece.part for piece in pieces])
        if layout is not None and layout != own:
            raise ValueError(
                f"this is part {layout['part']} of {layout['parts']}, and this rank keeps part "
                f"{own['part']} of {own['parts']} of its model: load merge_sharded_state_dicts() "
                "of all parts"
            )
        super().load_state_dict(state_dict)
        for piece in pieces:
            if not self._update.alone:
                piece.take(self.state, self.state.pop(piece.parameter, None), layout is None)

    def _pieces(self) -> list[Piece]:
        return [self._piece(p) for group in self.param_groups for p in group["params"]]

    def _piece(self, parameter: Tensor) -> Piece:
        """Raises RuntimeError for a parameter that was not there when the optimizer was made."""
        piece = self._update.pieces.get(parameter)
        if piece is None:
            raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} {_LATE}")
        return piece

    def own_state(self) -> dict[Any, Any]:
        """The state of this rank's pieces, but of parameters that the first rank keeps whole."""
        parts = [(piece.parameter, piece.part) for piece in self._pieces()]
        alone = {parameter for parameter, part in parts if part.parts > 1 and part.whole}
        return {key: value for key, value in self._held().items() if key not in alone}

    def _held(self) -> dict[Any, Any]:
        """The state of this rank's pieces, by parameter; entries of no parameter as they are."""
        whose = {piece.tensor: piece.parameter for piece in self._pieces()}
        return {
            whose.get(key, key): value
            for key, value in self.state.items()
            if key in whose or not isinstance(key, Tensor)
        }

    @contextmanager
    def _state_by_parameter(self, state: dict[Any, Any]) -> Iterator[None]:
        held, self.state = self.state, state  # type: ignore[assignment]
        try:
            yield
        finally:
            self.state = held

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: the parameters were divided when the optimizer was made."""
        if "_update" not in self.__dict__:  # torch's own constructor
            return super().add_param_group(param_group)
        raise ValueError(f"add_param_group(): what is added {_LATE}")

    def _follow(self) -> None:
        """Does nothing: step() says which parameter has come too late, on all ranks."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError: this rank has a part of the state only."""
        raise TypeError(
            "a sharded optimizer is not copied or pickled: save state_dict() or "
            "sharded_state_dict()"
        )


@without_grad
def _scale(grads: Sequence[Tensor], factor: Tensor) -> None:
    for grad in grads:
        grad.mul_(factor.to(grad.device, grad.dtype))
