# SPDX-License-Identifier: Apache-2.0
"""One parameter's gradient, from its hook (autograd's threads) to the end of its reduction (the
thread that waits). Used by the Reducer only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.arrays.buffers import NOWHERE
from farandole.calls.handles import is_absent
from farandole.torch.grad_mode import without_grad
from farandole.torch.gradients.bucket_view import BucketView
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.round import have_own_memory
from farandole.torch.kind import address_of
from farandole.torch.strides import dtype_of_gradient, laid_out, of_gradient, overlaps

if TYPE_CHECKING:
    from farandole.torch.gradients.reducer import Reducer


class Gradient:
    """Takes `.grad` when it has been accumulated, and puts the reduced one in its place.

    Meanwhile `.grad` is None: neither the user nor autograd can reach memory that is being
    reduced. What arrives there again in the same pass is taken in another round of that pass.
    """

    __slots__ = (
        *("__weakref__", "base", "encoded", "encoding", "grad", "handle", "name", "parameter"),
        *("reducer", "remove", "sparse_dim", "view"),
    )

    def __init__(self, reducer: Reducer, parameter: Tensor, name: str, encoding: Encoding) -> None:
        """`name` is the parameter's, for error texts; `encoding` is how it is sent."""
        self.reducer = reducer
        self.parameter = parameter
        self.name = name
        self.encoding = encoding
        self.remove: Callable[[], None] | None = None  # its hook
        self.view: BucketView | None = None  # memory for the gradient; None: torch's own
        self.handle: int | None = None  # the core's, while in a round
        self.grad: Tensor | None = None  # `.grad`, from the hook to the end of the round
        self.encoded: Tensor | None = None  # what receives the result; None: `grad` itself
        self.sparse_dim = 0  # > 0: sent without data, because it is sparse
        self.base: Tensor | None = None  # the result of an earlier round of the same pass

    def use_view(self, view: BucketView | None) -> None:
        """Sets the memory for results from now on; None: torch's own."""
        self.view = view
        self.encoding.use_view(view)

    # ---- hooks

    def hook(self) -> None:
        """Installs the hook, once; the parameter must require a gradient."""
        register: Any = self.parameter.register_post_accumulate_grad_hook
        self.remove = register(self.arrived).remove

    def unhook(self) -> None:
        """Removes the hook for good."""
        if self.remove is not None:
            self.remove()

    def arrived(self, parameter: Tensor) -> None:
        """Runs after autograd has accumulated into `.grad`."""
        now = self.reducer.now
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
            weight = self.encoding.weight
            if weight:
                now.batch.append(self)
                now.room -= weight
                if now.room <= 0:
                    now.send()
            else:
                self.send()

    # ---- sending

    def take(self) -> None:
        """Takes `.grad`, if there is one, before a round closes."""
        if self.grad is None:
            self.grad = self.parameter.grad
            self.parameter.grad = None

    @without_grad
    def send(self) -> None:
        """Begins the reduction of what was taken; without data if that is nothing."""
        grad, encoded = self.grad, None
        try:
            if grad is not None:
                encoded = self._encode(grad)
                if encoded is None:  # other ranks may not know that it is sparse
                    self.sparse_dim = grad.sparse_dim()
                    number = self.reducer.gradients.index(self)
                    self.reducer.now.sparse = (number << 8) + self.sparse_dim
            if encoded is None:
                self.send_nothing()
            else:
                self._send_data(encoded)
        except (TypeError, ValueError, RuntimeError) as reason:
            raise self.reducer.refuse(reason, self.name) from None

    def send_nothing(self) -> None:
        """Takes part in the reduction without data."""
        self.encoded = self.encoding.receive(self.parameter)
        self._submit(0, self.encoded, self.encoded)

    def _encode(self, grad: Tensor) -> Tensor | None:
        """The tensor to send; None: it needs another encoding, on all ranks."""
        if grad.layout is torch.strided:
            if overlaps(grad):  # it has no memory for the result
                grad = grad.contiguous()
            elif grad._base is None and not have_own_memory([grad.untyped_storage()]):
                grad = grad.detach().clone()  # autograd's, of several parameters perhaps
            address = address_of(grad)  # raises if it has no memory
            if self.view is None:
                self.reducer.now.claim(address, self)
            self.grad = grad
        encoded = self.encoding.encode(grad)
        if not self.parameter.is_contiguous():
            self.encoding.weight = 0  # what is sent in a batch becomes `.grad` as it is
        return encoded

    def _send_data(self, encoded: Tensor) -> None:
        view, sent, grad = self.view, encoded, self.grad
        away = view is not None and grad is not None and not view.holds(grad)
        if away and view is not None and self.encoding.carries(encoded) and view.fits(encoded):
            encoded = view.ready(encoded)
            if view.at == NOWHERE:  # on the CPU; frees torch's memory for the next gradient
                self.grad = sent = encoded.copy_(sent)
        self.encoded = encoded
        self._submit(address_of(sent), encoded, (encoded.untyped_storage(), sent.untyped_storage()))

    def _submit(self, input: int, output: Tensor, memory: object) -> None:
        self.handle = self.encoding.submit(input, address_of(output), memory)

    def wanted(self) -> bool:
        """Whether rounds must include it, with data or without."""
        if self.parameter.requires_grad or self.encoding.grouped:
            return True  # a frozen parameter with a gradient is stepped too
        return any(x is not None for x in (self.grad, self.parameter.grad, self.base))

    # ---- the end of the round

    @without_grad
    def deliver(self, final: bool) -> str | None:
        """Puts the result into `.grad`; not `final`: keeps it for the pass's next round.

        Returns an error text if the parameter's form has changed. May be called again.
        """
        if self.handle is None:
            return None
        result, grad, complaint = self._result(self.handle), self.grad, None
        if self.sparse_dim:  # it waits for the next round
            later = self.parameter.grad
            self.parameter.grad = grad if later is None or grad is None else later + grad
        if result is not None and final:
            result, complaint = fitted(result, self.parameter, self.name)
            self.parameter.grad = None if result is None else self._at_home(result)
        self.base = None if final else result
        self.forget()
        return complaint

    def _result(self, handle: int) -> Tensor | None:
        """What is reduced so far; None: no rank has had anything."""
        encoded = self.grad if self.encoded is None else self.encoded
        absent = self.grad is None or self.sparse_dim > 0
        if encoded is None or (absent and is_absent(handle)):
            return self.base
        result = self.encoding.decode(encoded, handle)
        if self.base is not None:
            return self.base + result
        keeps = self.view is not None and result is self.view.tensor
        return result.clone() if keeps and self.reducer.now.again else result  # it is used again

    def _at_home(self, result: Tensor) -> Tensor:
        """`result` in the memory where this parameter's gradient has to be, if any, or else with
        the strides that autograd gives it."""
        home, view, parameter = self.grad, self.view, self.parameter
        if result.layout is not torch.strided:
            return result
        kept = home is not None and home._base is not None
        if view is not None and view.fits(result) and parameter.is_contiguous():
            home, kept = view.ready(result), True
        strides = of_gradient(parameter)
        in_order = result.stride() == strides or (
            result.is_contiguous() and parameter.is_contiguous()
        )
        if result is home if kept else in_order:
            return result
        if home is None or (home.dtype, home.shape) != (result.dtype, result.shape):
            return laid_out(result, strides)
        right = kept or home.stride() == strides
        return home.copy_(result) if right else laid_out(result, strides)

    def forget(self) -> None:
        """Leaves the round."""
        self.grad = self.encoded = self.handle = None
        self.sparse_dim = 0

    def lose(self) -> None:
        """Leaves the round without a result, after a failure."""
        if self.view is not None and self.view.at == NOWHERE and self.handle is not None:
            self.use_view(None)  # peers may still read and write there
        self.base = None
        self.forget()


def fitted(grad: Tensor, parameter: Tensor, name: str) -> tuple[Tensor | None, str | None]:
    """(the gradient in its parameter's present form, None), or (None, error text).

    `model.half()` may have been called after a pass that only accumulated.
    """
    if grad.shape == parameter.shape:
        return grad.to(parameter.device, dtype_of_gradient(parameter) or grad.dtype), None
    return None, (
        f"the gradient of {name} has shape {[*grad.shape]}, and the parameter has become one of "
        f"{[*parameter.shape]}: change a parameter's shape between step() and backward()"
    )
