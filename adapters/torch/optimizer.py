# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer, a torch optimizer whose step() uses the gradients of all ranks.

Only one thread at a time may call step().
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from farandole.calls import part
from farandole.calls.arguments import check, check_compression, factors_of
from farandole.calls.requests import Scope
from farandole.equality import VerifyPolicy
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import Adasum, Average, ReduceOp
from farandole.start.agent_client import may_grow
from farandole.topology import is_initialized, size
from farandole.torch.arguments import (
    Groups,
    Settings,
    check_groups,
    default_name,
    parameter_names,
)
from farandole.torch.compiling import stay_outside
from farandole.torch.compression import Compression, Compressor
from farandole.torch.gradients.passes import Accumulation
from farandole.torch.gradients.reducer import Reducer
from farandole.torch.kind import check_parameter
from farandole.torch.models import comparison

Wrapped = TypeVar("Wrapped", bound=torch.optim.Optimizer)
_classes: dict[tuple[type, type], type] = {}  # from (user's class, kind) to the subclass of both


def DistributedOptimizer(
    optimizer: Wrapped,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    gradient_as_bucket_view: bool = False,
    verify_every: int | None = None,
    verify: Literal["warn", "raise"] = "warn",
) -> Wrapped:
    """Makes `optimizer` reduce its gradients over the ranks, and returns the same object.

    Replaces the optimizer's class by a class that derives from ReducingOptimizer and from the old
    class. For type checkers, add `assert isinstance(optimizer, ReducingOptimizer)`. State,
    parameter groups, schedulers and state_dict are kept. Every rank must call this after init(). If
    there are several optimizers, wrap them in the same order on every rank.

    - optimizer: an optimizer of torch.optim other than LBFGS, or of a class that derives from one.
    - named_parameters: the parameters' names, for error texts. By default, a name consists of the
      numbers of group and parameter.
    - compression: the form in which gradients are sent: Compression.none, fp16 or bf16, or your own
      class with compress and decompress.
    - backward_passes_per_step: number of backward passes per reduction. Passes in no_sync() do not
      count. The last pass reduces the gradients, and the other passes only accumulate them.
    - op: Average, Sum, Min, Max or Product of the ranks' gradients. With Adasum each rank steps on
      its own gradients, and step() combines the ranks' steps.
    - gradient_predivide_factor: a factor f divides gradients by f before the sum, and by size / f
      after the sum. Works with Average only.
    - groups, num_groups: accepted and checked for compatibility with Horovod. They have no effect,
      because farandole fuses the gradients that are ready.
    - sparse_as_dense: True sends sparse gradients as dense ones. False gathers their elements,
      uncompressed, and works with Average and Sum only.
    - gradient_as_bucket_view: True keeps CPU gradients in memory that all ranks of a host map, and
      reduces them there without a copy. If torch allocates a `.grad` elsewhere, as after
      zero_grad() has set it to None, farandole first copies it there. If you keep a tensor from
      `.grad`, clone it, because the next step changes it. Has no effect on a GPU. Does not work
      with Adasum.
    - verify_every: number of steps between two comparisons of the ranks' models. The first
      comparison is at the first step. Ranks compare parameters, the numbers in `param_groups`, and
      names and numbers in the state (such as step counts), in the first backward pass that reduces.
      With Adasum, step() compares. 0 means never. The default is FARANDOLE_VERIFY_EVERY (1,000).
    - verify: 'warn' warns once if ranks differ; 'raise' raises MismatchError on all ranks.
    - process_set: the ranks that reduce. On other ranks the optimizer stays local.

    When backward() returns, each `.grad` is reduced. It is a plain tensor, which you may clip, log
    or change. After backward(create_graph=True), its derivatives are those of this rank. A gradient
    that is missing on some ranks counts there as the identity, which is zeros for a sum or average.
    A gradient that is missing on all ranks stays None. Each backward() outside of no_sync() is a
    collective. A rank that skips one must call synchronize() instead. step() reduces the gradients
    that no pass has reduced: those of no_sync(), and those that you have written yourself.
    farandole sends everything that `.grad` holds, so reset gradients after each step unless op is
    Average.

    If you add parameters to `param_groups` later, by add_param_group() or by hand, farandole
    reduces their gradients as well. If you remove parameters, their gradients are not reduced from
    the next step() on. A parameter belongs to one optimizer. If a newer optimizer has the same
    parameter, the older optimizer's step() raises RuntimeError. A copied or unpickled optimizer
    does not reduce. Its step() raises RuntimeError until you make it a DistributedOptimizer.
    After torch.__future__.set_swap_module_params_on_conversion(True), convert and load the model
    first. Later, torch raises RuntimeError, because a swapped tensor has lost its hooks.

    Raises ValueError if an argument is wrong or farandole is not initialised, and TypeError if an
    argument has the wrong type.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    before, after = factors_of(op, gradient_predivide_factor, process_set)
    check(backward_passes_per_step=backward_passes_per_step)
    check_compression(compression)
    interval = VerifyPolicy.of(verify_every, verify)
    _check(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_groups(parameters, groups, num_groups)
    if op == Adasum and gradient_as_bucket_view:
        raise ValueError("gradient_as_bucket_view does not work with Adasum, which combines steps")
    names = parameter_names(optimizer, named_parameters)
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.requires_grad:
            check_parameter(parameter, name)
    alone = not process_set.included() or (process_set.size() == 1 and not may_grow())
    settings = Settings(
        process_set=set_id(process_set),
        reduce_op=ReduceOp(op),
        prescale=before,
        postscale=after,
        compressor=compression,
        sparse_as_dense=sparse_as_dense,
        views=gradient_as_bucket_view,
        ranks=process_set,
        verify=VerifyPolicy(0, False) if alone else interval,
    )
    adopt = partial(_adopt, optimizer, process_set=process_set, _passes=backward_passes_per_step)
    if op == Adasum:
        if alone:
            return adopt(None, kind=ReducingOptimizer)
        kind: Any = combining[Adasum]
        scope = Scope("adasum optimizer", process_set)
        compare = comparison(optimizer, kind.named, process_set, interval)
        fields: Any = {"_names": names, "_compressor": compression, "_scope": scope}
        return adopt(None, kind=kind, _before_step=compare, **fields)
    if alone:
        return adopt(None, kind=ReducingOptimizer)
    reducer = Reducer(settings, Accumulation(backward_passes_per_step), optimizer)
    try:
        adopt(reducer, kind=ReducingOptimizer)
        reducer.add(parameters, names)
    except BaseException:
        reducer.detach()
        reducer.consensus.give_name_back()
        optimizer.__class__ = _own(optimizer)
        if (inner := optimizer.__dict__.pop("_inner_step", None)) is not None:
            optimizer.step = inner  # type: ignore[method-assign]
        raise
    return optimizer


def _check(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}: pass an optimizer of torch.optim"
        )
    if isinstance(optimizer, ReducingOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS is not supported: its line search would take different steps on each rank"
        )
    if isinstance(optimizer, _Copy):
        optimizer.__class__ = _own(optimizer)


def _adopt(
    optimizer: Wrapped,
    reducer: Reducer | None,
    process_set: ProcessSet,
    kind: type,
    **fields: Any,
) -> Wrapped:
    """Makes the optimizer's class also derive from `kind`, and sets these fields."""
    stay_outside()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.__class__ = _class_of(type(optimizer), kind)
    inner = optimizer.__dict__.pop("step", None)
    if any(hasattr(inner, mark) for mark in _SCHEDULERS_MARKS):  # bypasses kind.step()
        inner = None
    optimizer.__dict__.update(
        _reducer=reducer,
        _inner_step=inner,
        _process_set=process_set,
        _followed=parameters,
        **fields,
    )
    if reducer is not None:
        weakref.finalize(optimizer, reducer.detach).atexit = False
    return optimizer


class _KindFirst(type):
    """Metaclass that looks methods up in the second base class before the first one.

    An object may change only to a class of the same memory layout, which the first base class
    determines. So the user's class is the first base class, but methods of `kind` come first.
    """

    def mro(cls) -> list[type]:
        own, kind = cls.__bases__
        return [cls, *(c for c in kind.__mro__ if c not in own.__mro__), *own.__mro__]


def _class_of(own: type, kind: type) -> type:
    """Returns the class that derives from `own` and `kind`. Each such pair has one class."""
    bases = own, kind
    if bases not in _classes:
        meta = type("_KindFirst", (_KindFirst, type(own)), {})
        names = {"__module__": __name__, "__qualname__": own.__qualname__}
        _classes[bases] = meta(own.__name__, bases, names)
    return _classes[bases]


def _own(optimizer: torch.optim.Optimizer) -> type:
    """Returns the optimizer's class as it was before DistributedOptimizer() changed it."""
    kind = type(optimizer)
    return kind.__bases__[0] if kind in _classes.values() else kind


# A step() that a scheduler has wrapped has one of these attributes, the second before torch 2.3.
_SCHEDULERS_MARKS = ("_wrapped_by_lr_sched", "_with_counter")


class ReducingOptimizer(torch.optim.Optimizer):
    """Class of the optimizers that DistributedOptimizer() returns. Has no public constructor."""

    _reducer: Reducer | None  # None with Adasum, or if no other rank takes part
    _inner_step: Callable[..., Any] | None  # set if the user has replaced the object's step()
    _process_set: ProcessSet
    _passes: int
    _followed: list[Tensor]  # the parameters in the groups when _follow() last looked
    _in_closure: bool  # True if the user's closure is running or has failed

    def _reduces(self) -> bool:
        """Returns True if copies must refuse to step, so as not to train on one rank alone."""
        return self._reducer is not None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Reduces the gradients that no pass has reduced, then takes the optimizer's own step."""
        self._opt_called = True  # torch's schedulers check this attribute
        closure = args[0] if args else kwargs.get("closure")
        reducer = self._reducer
        self._follow()
        self._in_closure = False
        if reducer is not None:
            if len(reducer.gradients) > len(self._followed):
                reducer.forget()
            reducer.check_usable()
            if callable(closure):
                args, kwargs = args[1:], {**kwargs, "closure": self._reduced(closure)}
            elif not reducer.accumulation.is_complete():
                if self.__dict__.pop("found_inf", None) is not None:  # set by GradScaler.step()
                    self.__dict__.pop("grad_scale", None)  # or a second try would scale twice
                    raise ValueError(
                        "a GradScaler has looked for overflows in gradients that are not reduced "
                        "yet, so each rank would decide alone whether it steps: call "
                        "optimizer.synchronize() before scaler.unscale_() and scaler.step()"
                    )
                reducer.synchronize(at_step=True)
        result = self._step_alone(*args, **kwargs)
        if reducer is not None:
            reducer.on_stepped()
        if "_step_count" in self.__dict__:  # schedulers of torch before 2.3 count here
            self._step_count += 1  # type: ignore[attr-defined]
        return result

    # Tells torch and its schedulers not to wrap this step(), because they have wrapped the inner
    # step() already.
    step.hooked = True  # type: ignore[attr-defined]
    for _mark in _SCHEDULERS_MARKS:
        setattr(step, _mark, True)
    del _mark

    def _step_alone(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the optimizer's own step.

        An exception in that step ends this rank's part in the job, because some parameters may have
        changed.
        """
        try:
            return (self._inner_step or super().step)(*args, **kwargs)
        except BaseException as reason:
            if self._reduces() and not self._in_closure:
                part.end(reason)
            raise

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that calls `closure`, then reduces the gradients not yet reduced."""

        def call() -> Any:
            self._in_closure = True  # an exception in the user's code must not end this rank's part
            loss = closure()
            self._in_closure = False
            if self._reducer is not None:
                self._reducer.synchronize(at_step=True)
            return loss

        return call

    def synchronize(self) -> None:
        """Reduces the gradients of all parameters, unless the last pass has reduced them.

        This is a collective. Call it in place of a backward pass that this rank skips, or on all
        ranks after passes that only accumulate.
        """
        if self._reducer is not None:
            self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which step() does not reduce.

        Horovod needs this context after synchronize(). With farandole, step() does not reduce after
        synchronize() anyway.
        """
        if self._reducer is not None and not self._reducer.round.open:
            self._reducer.accumulation.complete = True
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes only accumulate. A later pass or step() reduces."""
        if self._reducer is None:
            yield
            return
        passes = self._reducer.accumulation
        before, passes.holding = passes.holding, True
        try:
            yield
        finally:
            passes.holding = before

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Resets the gradients, as torch's method does.

        If a reduction is under way, raises FarandoleError and ends this rank's part in the job.
        """
        if self._reducer is not None:
            self._reducer.reset()
        self._follow()
        super().zero_grad(*args, **kwargs)

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes per reduction, not counting passes in no_sync()."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes backward_passes_per_step. Raises ValueError if `passes` is less than 1."""
        check(backward_passes_per_step=passes)
        self._passes = passes
        if self._reducer is not None:
            self._reducer.accumulation.wanted = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's method does. The group's gradients will be reduced as well.

        Raises LibraryError, and adds no group, if memory is short.
        """
        super().add_param_group(param_group)
        try:
            self._follow()
        except BaseException:
            self.param_groups.pop()  # otherwise this rank would train its parameters alone
            raise

    def _follow(self) -> None:
        """Starts to reduce the gradients of parameters that were added since the last call."""
        reducer, lists = self._reducer, [group["params"] for group in self.param_groups]
        same = sum(map(len, lists)) == len(self._followed)
        if same and all(map(is_, chain(*lists), self._followed)):
            return
        present = list(chain(*lists))
        if reducer is None:
            self._followed = present
            return
        known = {id(gradient.parameter) for gradient in reducer.gradients}
        taken = {gradient.name for gradient in reducer.gradients}
        new, names = list[Tensor](), list[str]()
        for number, parameters in enumerate(lists):
            for index, parameter in enumerate(parameters):
                if id(parameter) in known:
                    continue
                name, other = default_name(number, index), len(taken)
                while name in taken:  # a moved parameter has this name
                    name, other = f"parameter {other}", other + 1
                taken.add(name)
                new.append(parameter)
                names.append(name)
        if new:
            reducer.add(new, names)
            reducer.accumulation.complete = False
        self._followed = present  # last, because add() may fail

    def __repr__(self) -> str:
        return f"farandole.DistributedOptimizer: {super().__repr__()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Gives copies and pickles the original class, or _Copy. They do not reduce."""
        return _blank, (_own(self), self._reduces()), self.__getstate__()


# Classes of optimizers that combine the ranks' steps instead of gradients, by op.
# farandole.extras.adasum adds its class.
combining: dict[ReduceOp, type[ReducingOptimizer]] = {}


class _Copy(torch.optim.Optimizer):
    """The class of copies of a DistributedOptimizer.

    In a job of several ranks, a copy refuses to step, because it would train on this rank's
    gradients alone.
    """

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError in a job of several ranks.

        In a job of one rank, changes this object back to the original class and steps.
        """
        if is_initialized() and size() > 1:
            raise RuntimeError(
                f"this {type(self).__name__} is a copied or unpickled DistributedOptimizer and "
                "would train on this rank's gradients alone: on every rank, call optimizer = "
                "DistributedOptimizer(optimizer, model.named_parameters()) with the model whose "
                "parameters it has"
            )
        self.__class__ = _own(self)
        self.__setstate__({})  # as torch's constructor does, to prepare step()
        return type(self).step(self, *args, **kwargs)  # self.step may be a scheduler's wrapper

    step.hooked = True  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (_own(self), True), self.__getstate__()


def _blank(plain: type[torch.optim.Optimizer], reduced: bool) -> torch.optim.Optimizer:
    """Creates an uninitialised optimizer, for unpickling."""
    kind: Any = _class_of(plain, _Copy) if reduced else plain
    return cast("torch.optim.Optimizer", kind.__new__(kind))
