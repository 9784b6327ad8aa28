# SPDX-License-Identifier: Apache-2.0
"""One parameter's gradient, from its hook (autograd's threads) to the end of its reduction (the
thread that waits). Used by the Reducer only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole._library import ffi
from farandole.calls import leases
from farandole.calls.handles import is_absent
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.kind import address_of
from farandole.torch.strides import dtype_of_gradient, laid_out, of_gradient, overlaps

if TYPE_CHECKING:
    from farandole.torch.gradients.reducer import Reducer
    from farandole.torch.gradients.round import Round

_taken, _form = attrgetter("grad"), attrgetter("encoding.form")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_dtype_of, _shape_of, _is_on_cpu = (x.__get__ for x in (_base.dtype, _base.shape, _base.is_cpu))
_users: Callable[[int], int] = torch._C._storage_Use_Count
_ALONE = 2  # references to a storage that one tensor uses: the tensor's, and the caller's


class Gradient:
    """Takes `.grad` when it has been accumulated, and puts the reduced one in its place.

    Meanwhile `.grad` is None: neither the user nor autograd can reach memory that is being
    reduced. What arrives there again in the same pass is taken in another round of that pass.
    """

    __slots__ = (
        *("__weakref__", "base", "encoded", "encoding", "grad", "name", "parameter", "reducer"),
        *("remove", "sparse_dim"),
    )

    def __init__(self, reducer: Reducer, parameter: Tensor, name: str, encoding: Encoding) -> None:
        """`name` is the parameter's, for error texts; `encoding` is how it is sent."""
        self.reducer = reducer
        self.parameter = parameter
        self.name = name
        self.encoding = encoding
        self.remove: Callable[[], None] | None = None  # its hook
        self.base: Tensor | None = None  # the result of an earlier round of the same pass
        self.forget()

    def forget(self) -> None:
        """Leaves the round."""
        self.grad: Tensor | None = None  # `.grad`, from the hook to the end of the round
        self.encoded: Tensor | None = None  # what receives the result; None: `grad` itself
        self.sparse_dim = 0  # > 0: sent without data, because it is sparse

    def hook(self) -> None:
        """Installs the hook, once the parameter requires a gradient."""
        if self.remove is None and self.parameter.requires_grad:
            register: Any = self.parameter.register_post_accumulate_grad_hook
            self.remove = register(self.arrived).remove

    def arrived(self, parameter: Tensor) -> None:
        """Runs after autograd has accumulated into `.grad`."""
        now = self.reducer.now
        if not now.sending:
            if now.inside() is None:
                now = self.reducer.enter(parameter)
            if not now.sending:
                return
        grad = parameter.grad
        if self.grad is not None:
            now.late = True
        elif grad is not None:
            self.grad = grad
            parameter.grad = None
            most = self.encoding.most
            if most == 0:
                self.send()
                return
            batch = now.batch
            batch.append(self)
            if len(batch) >= most:
                self.reducer.send()

    # ---- sending

    def wanted(self) -> bool:
        """True if rounds must include it, with data or without."""
        if self.parameter.requires_grad:
            return True  # a frozen parameter with a gradient is stepped too
        return any(x is not None for x in (self.grad, self.parameter.grad, self.base))

    def take(self) -> None:
        """Takes `.grad`, if there is one, before a round closes."""
        if self.grad is None:
            self.grad = self.parameter.grad
            self.parameter.grad = None

    def send(self) -> None:
        """Begins the reduction of what was taken; without data if that is nothing. Raises what is
        wrong with it on all ranks."""
        try:
            with torch.no_grad():
                grad, encoded = self.grad, None
                if grad is not None:
                    encoded = self._encode(grad)
                    if encoded is None:  # other ranks may not know that it is sparse
                        self.sparse_dim = grad.sparse_dim()
                        number = self.reducer.gradients.index(self)
                        self.reducer.now.sparse = (number << 8) + self.sparse_dim
                if encoded is None:  # takes part without data
                    self.encoded = x = self.encoding.receive(self.parameter)
                    handle = self.encoding.submit(0, address_of(x), x)
                else:
                    handle = self._send_data(encoded)
                self.reducer.now.sent[self] = handle
        except (TypeError, ValueError, RuntimeError) as reason:
            raise self.reducer.refuse(reason, self.name) from None

    def _encode(self, grad: Tensor) -> Tensor | None:
        """The tensor to send; None: it needs another encoding, on all ranks."""
        if grad.layout is torch.strided:
            if overlaps(grad):  # it has no memory for the result
                grad = grad.contiguous()
            elif grad._base is None and not _have_own_memory([grad.untyped_storage()]):
                grad = grad.detach().clone()  # autograd's, of several parameters perhaps
            address = address_of(grad)  # raises if it has no memory
            memory = self.reducer.now.memory
            if self.encoding.view is None and grad.numel() > 0:
                if address in memory:
                    raise RuntimeError(
                        "another parameter has its gradient in the same memory; give each its own "
                        ".grad"
                    )
                memory.add(address)
            self.grad = grad
        encoded = self.encoding.encode(grad)
        if not self.parameter.is_contiguous():
            self.encoding.most = 0  # what is sent in a batch becomes `.grad` as it is
        return encoded

    def _send_data(self, encoded: Tensor) -> int:
        view, sent = self.encoding.view, encoded
        away = view is not None and self.grad is not None and not view.holds(self.grad)
        if view is not None and away and self.encoding.carries(sent) and view.fits(sent):
            encoded = view.ready()
            self.grad = sent = encoded.copy_(sent)  # frees torch's memory for the next gradient
        self.encoded = encoded
        memory = encoded.untyped_storage(), sent.untyped_storage()
        return self.encoding.submit(address_of(sent), address_of(encoded), memory)

    # ---- the end of the round

    def deliver(self, handle: int, final: bool) -> str | None:
        """Puts the result of a finished call into `.grad`; not `final`: keeps it for the next round
        of the pass.

        Returns an error text if the parameter can't have it.
        """
        p, result, complaint = self.parameter, self._result(handle), None
        if not final:
            self.base = result
            if self.sparse_dim and self.grad is not None:  # it waits for the next round
                p.grad = self.grad if p.grad is None else p.grad + self.grad
        elif result is None or self._takes(result):
            self.base = None
            p.grad = None if result is None else self._fitted(result)
        else:
            self.base = p.grad = None
            complaint = (
                f"the gradient of {self.name} is of {result.dtype} and has shape "
                f"{[*result.shape]}, and the parameter is of {p.dtype} and has become one of "
                f"{[*p.shape]}: change a parameter's form between step() and backward()"
            )
        self.forget()
        return complaint

    def _result(self, handle: int) -> Tensor | None:
        """What is reduced so far; None: no rank has had anything."""
        encoded = self.grad if self.encoded is None else self.encoded
        absent = self.grad is None or self.sparse_dim > 0
        if encoded is None or (absent and is_absent(handle)):
            return self.base
        result, view = self.encoding.decode(encoded, handle), self.encoding.view
        if self.base is not None:
            return self.base + result
        keeps = view is not None and result is view.tensor
        return result.clone() if keeps and self.reducer.now.again else result  # it is used again

    def _takes(self, result: Tensor) -> bool:
        p = self.parameter
        return result.shape == p.shape and torch.can_cast(result.dtype, p.dtype)

    def _fitted(self, result: Tensor) -> Tensor:
        """`result` in its parameter's present form: model.half() may have been called meanwhile."""
        dtype = dtype_of_gradient(self.parameter) or result.dtype
        return self._at_home(result.to(self.parameter.device, dtype))

    def _at_home(self, result: Tensor) -> Tensor:
        """`result` in the memory where this parameter's gradient has to be, if any, or else with
        the strides that autograd gives it."""
        home, view, parameter = self.grad, self.encoding.view, self.parameter
        if result.layout is not torch.strided:
            return result
        kept = home is not None and home._base is not None
        if view is not None and view.fits(result) and parameter.is_contiguous():
            home, kept = view.ready(), True
        strides = of_gradient(parameter)
        in_order = result.stride() == strides or (
            result.is_contiguous() and parameter.is_contiguous()
        )
        if result is home if kept else in_order:
            return result
        if home is None or (home.dtype, home.shape) != (result.dtype, result.shape):
            return laid_out(result, strides)
        return home.copy_(result) if kept or home.stride() == strides else laid_out(result, strides)

    def lose(self) -> None:
        """Leaves the round without a result, after a failure."""
        if self.encoding.view is not None and self in self.reducer.now.sent:
            self.encoding.use_view(None)  # peers may still read and write there
        self.base = None
        self.forget()


def send_together(batch: list[Gradient], now: Round) -> Exception | None:
    """Sends gradients that were taken by one call, at a third of the cost of single calls; one by
    one if any can't be sent as it is. Returns the core's error."""
    grads = [*map(_taken, batch)]
    calls, dtypes, shapes = zip(*map(_form, batch), strict=True)
    try:
        storages = [*map(Tensor.untyped_storage, grads)]
    except NotImplementedError:  # a gradient is sparse, and its parameter's last one was not
        storages = []
    if (
        storages
        and (*map(_dtype_of, grads),) == dtypes
        and (*map(_shape_of, grads),) == shapes
        and all(map(_is_on_cpu, grads))
        and all(map(Tensor.is_contiguous, grads))
        and not any(map(Tensor.is_neg, grads))
        and _have_own_memory(storages)
    ):
        addresses = [*map(Tensor.data_ptr, grads)]
        own = set(addresses)
        if len(own) == len(batch) and now.memory.isdisjoint(own):
            now.memory |= own
            places = ffi.new("uintptr_t[]", addresses)
            numbers = ffi.new("int64_t[]", calls)
            count = len(calls)
            handles, failure = leases.lend_all(numbers, places, places, ffi.NULL, storages, count)
            now.sent.update(zip(batch, handles, strict=True))
            now.plain += batch
            return failure
    for gradient in batch:
        gradient.send()
    return None


def _have_own_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """True if one tensor alone uses each of them.

    If gradients pass only through views, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share memory.
    """
    return {*map(_users, map(attrgetter("_cdata"), storages))} <= {_ALONE}
