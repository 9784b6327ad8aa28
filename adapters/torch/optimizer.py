# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: a torch optimizer whose step() uses the gradients of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from farandole.calls.arguments import check
from farandole.ops import Adasum, Average, ReduceOp
from farandole.process_sets import ProcessSet, global_process_set, set_id
from farandole.torch.adasum import Deltas, DeltaStep
from farandole.torch.compiling import stay_outside
from farandole.torch.compression import Choice, Compression, chooser
from farandole.torch.groups import Groups, assign
from farandole.torch.kind import check_parameter
from farandole.torch.names import default_name, parameter_names
from farandole.torch.reducer import Reducer
from farandole.torch.settings import Settings
from farandole.torch.weights import factor_of

__all__ = ["DistributedOptimizer"]

_distributed: dict[tuple[type, ...], type] = {}  # by the classes that they are made of


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Choice = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    accumulate: Literal["sum", "mean"] = "sum",
    gradient_as_bucket_view: bool = False,
) -> Any:
    """Makes `optimizer` reduce gradients over the ranks, and returns it: the very same object.

    Its state, parameter groups, schedulers and state_dict stay. Every rank must call this, in the
    same order where there are several optimizers, after init().

    named_parameters: names for error texts; default: numbers of group and parameter.
    compression: a class with compress and decompress, or a function (name, parameter) -> class.
    backward_passes_per_step: a gradient is reduced after so many arrivals, or at step().
    accumulate: whether these passes are summed, as in plain torch, or averaged.
    op: Average, Sum, Min, Max or Product of the ranks' gradients. With Adasum each rank steps on
        its own gradients, and step() combines how far they went.
    gradient_predivide_factor: f divides by f before the sum and by size / f after it; Average only.
    groups: lists of parameters that are reduced together, or a number of such groups.
    sparse_as_dense: sparse gradients travel dense; without it their rows are gathered,
        uncompressed; Average and Sum only.
    gradient_as_bucket_view: gradients lie in memory in which they are reduced without a copy: on
        the CPU what all ranks of the host map, on a GPU windows of NCCL's. A `.grad` that torch
        made anew (after zero_grad(), which sets None) is copied there on the CPU; on a GPU its
        result comes there. That becomes `.grad`.
        A tensor kept from `.grad` changes with the next step; clone it. Not with Adasum.
    process_set: who reduces; on other ranks the optimizer stays a local one.

    Gradients that are missing on some ranks count as zeros; on all, they stay None. After
    backward(), the first use of a `.grad` waits for the reduction of all, as synchronize() does.
    Raises
    ValueError for wrong arguments, and when farandole is not initialised.
    """
    check(op=op, process_set=process_set, gradient_predivide_factor=gradient_predivide_factor)
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step, accumulate)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = parameter_names(optimizer, named_parameters)
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.requires_grad:
            check_parameter(parameter, name)
    alone = not process_set.included() or process_set.size() == 1
    if op == Adasum:
        if gradient_as_bucket_view:
            raise ValueError("gradient_as_bucket_view does not go with Adasum: steps are combined")
        deltas = None if alone else Deltas(process_set, chooser(compression), names)
        return _adopt(optimizer, None, process_set, deltas)
    settings = Settings(
        process_set=set_id(process_set),
        reduce_op=ReduceOp(op),
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor,
        compressor_of=chooser(compression),
        sparse_as_dense=sparse_as_dense,
        groups=assign(parameters, groups, num_groups),
    )
    mean = accumulate == "mean"
    idle = not process_set.included() or (alone and not mean)
    reducer = None if idle else Reducer(settings, backward_passes_per_step, mean)
    if reducer is not None:
        for parameter, name in zip(parameters, names, strict=True):
            reducer.add(parameter, name)
        if gradient_as_bucket_view:
            reducer.lay_out()
        reducer.hook()
    return _adopt(optimizer, reducer, process_set)


def _check(
    optimizer: torch.optim.Optimizer, op: int, predivide: float, passes: int, accumulate: str
) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}: pass an optimizer of torch.optim"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS is not supported: its line search would take different steps on each rank"
        )
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=Average only")
    _check_passes(passes)
    if accumulate not in ("sum", "mean"):
        raise ValueError(f"accumulate is 'sum' or 'mean', not {accumulate!r}")


def _check_passes(passes: int) -> None:
    check(backward_passes_per_step=passes)


def _adopt(
    optimizer: torch.optim.Optimizer,
    reducer: Reducer | None,
    process_set: ProcessSet,
    deltas: Deltas | None = None,
) -> torch.optim.Optimizer:
    """Changes the class of the object to one derived from its own, which reduces."""
    stay_outside()
    own = type(optimizer)
    bases = (_Distributed, own) if deltas is None else (DeltaStep, _Distributed, own)
    if bases not in _distributed:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _distributed[bases] = type(own.__name__, bases, names)
    inner = optimizer.__dict__.pop("step", None)
    if any(hasattr(inner, mark) for mark in _SCHEDULERS_MARKS):  # it would bypass our step()
        inner = None
    optimizer.__class__ = _distributed[bases]
    optimizer.__dict__.update(
        _reducer=reducer, _inner_step=inner, _process_set=process_set, _deltas=deltas
    )
    if reducer is not None:
        weakref.finalize(optimizer, reducer.detach).atexit = False
    return optimizer


# By these a scheduler knows a step() that it has wrapped: torch today, torch before 2.3.
_SCHEDULERS_MARKS = ("_wrapped_by_lr_sched", "_with_counter")


class _Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer puts before the optimizer's own class."""

    _reducer: Reducer | None  # None: nobody to reduce with
    _inner_step: Callable[..., Any] | None  # where somebody has replaced the object's step()
    _process_set: ProcessSet

    def step(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The optimizer's own step, on reduced gradients; a closure's gradients are reduced too.

        timeout: seconds, as in synchronize(), before anything is stepped; not with a closure.
        """
        self._opt_called = True  # what torch's schedulers look at
        closure = args[0] if args else kwargs.get("closure")
        reducer = self._reducer
        if timeout is not None and callable(closure):
            raise ValueError("timeout does not go with a closure; synchronize() takes one")
        if reducer is not None:
            if callable(closure):
                args, kwargs = args[1:], {**kwargs, "closure": self._reduced(closure)}
            elif not reducer.settled:
                reducer.synchronize(timeout, once=True)
        inner = self._inner_step or super().step
        result = inner(*args, **kwargs)
        if reducer is not None:
            reducer.stepped()
        if "_step_count" in self.__dict__:  # schedulers of torch before 2.3 count here
            self._step_count += 1  # type: ignore[attr-defined]
        return result

    # Already hooked and wrapped as far as torch is concerned: the inner step is.
    step.hooked = True  # type: ignore[attr-defined]
    for _mark in _SCHEDULERS_MARKS:
        setattr(step, _mark, True)
    del _mark

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return call

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks until the gradients of all parameters are reduced, in `.grad`.

        For what comes between backward() and step(): clipping, GradScaler.unscale_(), logging.
        Collective. step() notices that it has been called. Raises StallError after `timeout`
        seconds, naming gradients and the ranks that have not come; the reduction goes on, and this
        or step() must be called again before the next backward() or zero_grad().
        """
        if self._reducer is not None:
            self._reducer.synchronize(timeout)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In it step() reduces nothing, unless a reduction is under way."""
        reducer = self._reducer
        if reducer is not None and not reducer.round.open:
            reducer.settled = True
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it gradients only accumulate; the next backward pass outside, or step(), reduces."""
        reducer = self._reducer
        before = reducer is not None and reducer.passes.holding
        if reducer is not None:
            reducer.hold(True)
        try:
            yield
        finally:
            if reducer is not None:
                reducer.hold(before)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; reductions under way are waited for and dropped, on all ranks alike."""
        if self._reducer is not None:
            self._reducer.reset()
        super().zero_grad(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        """Reduces the gradients, scales them to a total norm of `max_norm` at most, returns it.

        Further arguments as in torch.nn.utils.clip_grad_norm_. Collective.
        """
        if self._reducer is not None:
            self._reducer.synchronize(once=True)
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, *args, **kwargs)

    def set_weight(self, weight: float) -> None:
        """Makes the average a weighted one from the next backward pass on, as for unequal batches.

        Gradients are multiplied by the rank's weight and divided by the sum of all weights; so with
        mean losses the weight is the number of samples. Collective. Raises ValueError on all ranks
        where a weight is negative or all are 0, and with another op than Average.
        """
        if self._reducer is not None:
            scope, averages = self._reducer.round.scope, self._reducer.averages
            self._reducer.weigh(factor_of(weight, averages, f"{scope}.weight", self._process_set))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of arrivals before a gradient is reduced. ValueError below 1."""
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters' gradients are reduced too."""
        super().add_param_group(param_group)
        if self._reducer is not None:
            group = len(self.param_groups) - 1
            parameters = self.param_groups[group]["params"]
            for index, parameter in enumerate(parameters):
                self._reducer.add(parameter, default_name(group, index))
            if self._reducer.in_buckets:
                self._reducer.lay_out(len(self._reducer.gradients) - len(parameters))
            self._reducer.hook()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() reads this before it reads gradients: the moment to reduce them."""
        if self._reducer is not None:
            self._reducer.synchronize(once=True)
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers of the original class."""
        plain = next(bases[-1] for bases, ours in _distributed.items() if ours is type(self))
        return _blank, (plain,), self.__getstate__()


def _blank(plain: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer that has not been initialised, for unpickling."""
    return plain.__new__(plain)
