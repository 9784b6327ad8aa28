# SPDX-License-Identifier: Apache-2.0
"""The gradient of one parameter. Only the Reducer uses this module.

A hook takes the gradient on one of autograd's threads. The thread that waits for the round delivers
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from farandole._library import ffi
from farandole.calls import leases
from farandole.calls.handles import is_absent
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.kind import address_of, check_no_tangent, check_unused
from farandole.torch.strides import dtype_of_gradient, laid_out, of_gradient, overlaps

if TYPE_CHECKING:
    from farandole.torch.gradients.reducer import Reducer
    from farandole.torch.gradients.round import Round

_taken, _form = attrgetter("grad"), attrgetter("encoding.form")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_dtype_of, _shape_of, _is_on_cpu = (x.__get__ for x in (_base.dtype, _base.shape, _base.is_cpu))
_users: Callable[[int], int] = torch._C._storage_Use_Count
# Number of references to a storage that only one tensor uses: the tensor's and the caller's.
_ALONE = 2


class Gradient:
    """Takes `.grad` once autograd has accumulated it, and stores the reduced gradient there.

    In between, `.grad` is None, so neither the user nor autograd can write to memory that is being
    reduced. If autograd accumulates a gradient again in the same pass, another round reduces it.
    """

    __slots__ = (
        *("__weakref__", "base", "encoded", "encoding", "grad", "name", "parameter", "pin"),
        *("reducer", "remove_hook", "sparse_dim"),
    )

    def __init__(self, reducer: Reducer, parameter: Tensor, name: str, encoding: Encoding) -> None:
        """`name` is the parameter's name in error texts. `encoding` converts the gradient."""
        self.reducer = reducer
        self.parameter = parameter
        self.name = name
        self.encoding = encoding
        self.remove_hook: Callable[[], None] | None = None  # None if no hook is installed
        # torch.utils.swap_tensors() would silently drop the hook. It raises an error if a weak
        # reference to the tensor exists.
        self.pin: ref[Tensor] | None = None
        self.base: Tensor | None = None  # the result of an earlier round of the same pass
        self._leave_round()

    def _leave_round(self) -> None:
        self.grad: Tensor | None = None  # taken from the parameter's `.grad`; None after the round
        self.encoded: Tensor | None = None  # tensor for the result, or None if that is `grad`
        # Above 0 if the gradient is sparse and was therefore reported as absent in this round.
        self.sparse_dim = 0

    def install_hook(self) -> None:
        """Installs the hook if the parameter requires a gradient and has no hook yet."""
        if self.remove_hook is None and self.parameter.requires_grad:
            parameter: Any = self.parameter
            register = parameter.register_post_accumulate_grad_hook
            self.remove_hook = register(self.on_accumulated).remove
            self.pin = ref(parameter)
            # If swap_tensors() was called before, the parameter has a dict of earlier hooks that
            # autograd does not know. This tells autograd.
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks

    def on_accumulated(self, parameter: Tensor) -> None:
        """The hook that autograd calls after it has accumulated into `.grad`."""
        now = self.reducer.round
        if not now.sending:
            if now.inside() is None:
                now = self.reducer.enter_pass(parameter)
            if not now.sending:
                return
        grad = parameter.grad
        if self.grad is not None:
            now.late = True
        elif grad is not None:
            self.grad = grad
            parameter.grad = None
            limit = self.encoding.batch_limit
            if limit == 0:
                self.send()
                return
            batch = now.batch
            batch.append(self)
            if len(batch) >= limit:
                self.reducer.send_batch()

    # ---- sending

    def takes_part(self) -> bool:
        """Returns True if each round must send this gradient or report it as absent.

        A frozen parameter takes part if it has a gradient, because the optimizer then updates the
        parameter.
        """
        if self.parameter.requires_grad:
            return True
        return any(x is not None for x in (self.grad, self.parameter.grad, self.base))

    def send(self) -> None:
        """Starts to reduce the gradient that a hook has taken, or else the gradient in `.grad`.

        If there is neither, reports the gradient as absent. If the gradient cannot be sent, the
        round fails, and all ranks raise the error.
        """
        try:
            with torch.no_grad():
                grad, encoded = self.grad, None
                if grad is None and (grad := self.parameter.grad) is not None:
                    self._refuse_shared(grad)
                    check_unused(grad, writes=True)  # the user may have started a call on it
                    self.grad, self.parameter.grad = grad, None
                if grad is not None:
                    check_no_tangent(grad)
                    encoded = self._encode(grad)
                    if encoded is None:  # sparse; other ranks may not yet know
                        self.sparse_dim = grad.sparse_dim()
                        number = self.reducer.gradients.index(self)
                        self.reducer.round.sparse = (number << 8) + self.sparse_dim
                if encoded is None:  # absent
                    self.encoded = x = self.encoding.receive(self.parameter)
                    handle = self.encoding.submit(0, address_of(x), x)
                else:
                    handle = self._send_data(encoded)
                self.reducer.round.sent[self] = handle
        except (TypeError, ValueError, RuntimeError) as reason:
            raise self.reducer.fail(reason, self.name) from None

    def _encode(self, grad: Tensor) -> Tensor | None:
        """Returns the tensor to send, or None if the gradient is sparse.

        If the gradient is sparse, all ranks must first change to the encoding Rows.
        """
        if grad.layout is torch.strided:
            if overlaps(grad):  # the memory of `grad` cannot hold the result
                grad = grad.contiguous()
            elif grad._base is None and not _have_own_memory([grad.untyped_storage()]):
                grad = grad.detach().clone()  # another parameter's gradient may use the memory
            address = address_of(grad)  # raises if `grad` has no memory
            self._refuse_shared(grad)
            if self.encoding.view is None and grad.numel() > 0:
                self.reducer.round.memory.add(address)
            self.grad = grad
        encoded = self.encoding.encode(grad)
        if not self.parameter.is_contiguous():
            self.encoding.batch_limit = 0  # a batch's gradients must keep their strides
        return encoded

    def _refuse_shared(self, grad: Tensor) -> None:
        """Raises RuntimeError if another gradient of this round uses the same memory."""
        memory = self.reducer.round.memory
        if memory and grad.layout is torch.strided and address_of(grad) in memory:
            raise RuntimeError(
                "another parameter's gradient uses the same memory: give each its own .grad"
            )

    def _send_data(self, encoded: Tensor) -> int:
        view, sent = self.encoding.view, encoded
        outside = view is not None and self.grad is not None and not view.holds(self.grad)
        if view is not None and outside and self.encoding.is_plain(sent) and view.fits(sent):
            encoded = view.ready()
            self.grad = sent = encoded.copy_(sent)  # frees torch's memory for the next gradient
        self.encoded = encoded
        memory = encoded.untyped_storage(), sent.untyped_storage()
        return self.encoding.submit(address_of(sent), address_of(encoded), memory)

    # ---- the end of the round

    def deliver(self, handle: int, final: bool) -> str | None:
        """Stores the result of a finished call in `.grad`.

        If `final` is False, the pass has another round, and the result is kept for that round
        instead. Returns an error text if the parameter cannot hold the result, else None.
        """
        p, result, complaint = self.parameter, self._result(handle), None
        if not final:
            self.base = result
            if self.sparse_dim and self.grad is not None:  # the next round sends `.grad`
                p.grad = self.grad if p.grad is None else p.grad + self.grad
        elif result is None or self._can_hold(result):
            self.base = None
            p.grad = None if result is None else self._fitted(result)
        else:
            self.base = p.grad = None
            complaint = (
                f"the gradient of {self.name} has dtype {result.dtype} and shape "
                f"{[*result.shape]}, but the parameter now has dtype {p.dtype} and shape "
                f"{[*p.shape]}: change dtypes and shapes only between step() and backward()"
            )
        self._leave_round()
        return complaint

    def _result(self, handle: int) -> Tensor | None:
        """Returns the sum of this pass's results so far, or None if no rank had a gradient."""
        encoded = self.grad if self.encoded is None else self.encoded
        absent = self.grad is None or self.sparse_dim > 0
        if encoded is None or (absent and is_absent(handle)):
            return self.base
        result, view = self.encoding.decode(encoded, handle), self.encoding.view
        if self.base is not None:
            return self.base + result
        in_view = view is not None and result is view.tensor
        # Copies, because the next round of the pass will use the view's memory again.
        return result.clone() if in_view and self.reducer.round.again else result

    def _can_hold(self, result: Tensor) -> bool:
        p = self.parameter
        return result.shape == p.shape and torch.can_cast(result.dtype, p.dtype)

    def _fitted(self, result: Tensor) -> Tensor:
        """Converts `result` to the parameter's present dtype and device.

        For example, model.half() may have changed the dtype since the gradient was sent.
        """
        dtype = dtype_of_gradient(self.parameter) or result.dtype
        return self._placed(result.to(self.parameter.device, dtype))

    def _placed(self, result: Tensor) -> Tensor:
        """Returns `result` in the memory that `.grad` must keep, if there is such memory.

        That is a bucket view or a view that the user has made. Otherwise, returns `result` with the
        strides that autograd gives to gradients.
        """
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

    def drop(self) -> None:
        """Leaves a failed round without a result."""
        if self.encoding.view is not None and self in self.reducer.round.sent:
            self.encoding.use_view(None)  # peers may still read and write the view's memory
        self.base = None
        self._leave_round()


def send_together(batch: list[Gradient], now: Round) -> Exception | None:
    """Sends all gradients in one call, which takes a third of the time of separate calls.

    If one of the gradients cannot be sent unchanged, sends each gradient by a separate call.
    Returns the core's error, or None.
    """
    grads = [*map(_taken, batch)]
    calls, dtypes, shapes = zip(*map(_form, batch), strict=True)
    try:
        storages = [*map(Tensor.untyped_storage, grads)]
    except NotImplementedError:  # a gradient is sparse now, but was dense in the last round
        storages = []
    if (
        storages
        and forward_ad._current_level < 0  # otherwise gradients may have tangents
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
    """Returns True if each storage is used by one tensor only.

    If only views lie between the loss and a parameter, the gradient's memory may also belong to
    other parameters' gradients, or to the tensor that the user passed to backward().
    """
    return {*map(_users, map(attrgetter("_cdata"), storages))} <= {_ALONE}
