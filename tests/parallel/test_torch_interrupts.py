# SPDX-License-Identifier: Apache-2.0
"""An exception that leaves a call, a backward pass that has sent something, or step() ends its
rank's part in the job: its next call raises, and the others get a PeerError with the cause."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole as fd
import farandole.torch as hvd
from farandole.calls import part
from farandole.observe.flight import own_page
from harness.in_flight import CANARY, SIZE, late
from harness.toys import grad_is, push, push_each, total, toys

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(autouse=True)
def _restart() -> Iterator[None]:
    """The same ranks meet again, and all is as before."""
    yield
    hvd.shutdown()
    hvd.init()
    (p,), optimizer = toys()
    push(p)
    grad_is(p, total(hvd.Average, [0]))
    optimizer.step()


def check_ended(others: Callable[[], object], cause: str) -> None:
    """The last rank's part has ended; `others`: a call of the other ranks that needs it."""
    if late():
        for call in (lambda: hvd.allreduce(torch.ones(1)), lambda: fd.allgather(np.ones(2))):
            with pytest.raises(hvd.ShutdownError, match=cause):
                call()
        assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    else:
        with pytest.raises(hvd.PeerError, match=rf"rank {hvd.size() - 1} left: .*{cause}"):
            others()


# ---- Ctrl-C at random moments


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C in this block, again and again: Python drops one that comes in a finalizer."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)  # Ctrl-C in torch.no_grad() may leave it off
    if not part.has_ended():  # it came between two calls: as the end of a program that lets it pass
        part.end(caught.value)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "half": {"compression": hvd.Compression.fp16},
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # dropped ones
@pytest.mark.parametrize("options", OPTIONS)
def test_ctrl_c_at_random_moments_of_training(options: str) -> None:
    """No rank hangs, and nobody writes to memory whose owner has gone."""
    choose = random.Random(options)
    for _ in range(6):
        ps = [nn.Parameter(torch.zeros(n)) for n in (4, SIZE, 3 * SIZE, SIZE)]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **OPTIONS[options])

        def train(ps: Any = ps, optimizer: Any = optimizer) -> None:
            while True:
                push_each(*((p, 0) for p in ps))
                optimizer.step()
                optimizer.zero_grad()

        MPI.COMM_WORLD.Barrier()  # all have made theirs
        moment = choose.uniform(0.001, 0.03)
        if late():
            with interrupted_after(moment):
                train()
        del ps, optimizer
        check_ended(train, "KeyboardInterrupt")
        del train
        gc.collect()
        canaries = [torch.full((size,), CANARY) for size in [SIZE, 3 * SIZE, 4] * 8]
        hvd.shutdown()
        assert all(bool((x == CANARY).all()) for x in canaries)
        hvd.init()


WAITS: dict[str, Callable[[], object]] = {
    "call": lambda: hvd.allreduce(torch.ones(SIZE), name="waits"),
    "handle": lambda: hvd.allgather_async(torch.ones(SIZE), name="waits").wait(),
    "numpy": lambda: fd.allreduce(np.ones(SIZE), name="waits"),
    "object": lambda: hvd.broadcast_object("x", hvd.size() - 1, name="waits"),
    "barrier": hvd.barrier,
    "join": hvd.join,
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_in_a_wait(wait: str) -> None:
    if late():
        with interrupted_after(0.05):
            (WAITS[wait] if wait != "object" else lambda: hvd.broadcast_object(None, 0))()
    MPI.COMM_WORLD.Barrier()
    check_ended(WAITS[wait], "KeyboardInterrupt")


class Preempted(RuntimeError):
    """What a user's handler raises."""


def signal_once_it_waits(number: int) -> None:
    """Sends this process a signal when a call of its main thread has begun to wait."""

    def run() -> None:
        while not own_page(1)["now"]["waiters"]:
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=run).start()


def test_what_a_handler_raises_in_a_wait() -> None:
    def handler(_signal: int, _frame: object) -> None:
        raise Preempted("by the scheduler")

    before = signal.signal(signal.SIGALRM, handler)
    if late():
        signal_once_it_waits(signal.SIGALRM)
        with pytest.raises(Preempted):
            hvd.allreduce(torch.ones(3), name="waits")
    MPI.COMM_WORLD.Barrier()
    signal.signal(signal.SIGALRM, before)
    check_ended(lambda: hvd.allreduce(torch.ones(3), name="waits"), "Preempted: by the scheduler")


# ---- exceptions of the user's code


def made(count: int = 1, **options: Any) -> Any:
    """toys(), once all ranks have theirs."""
    found = toys(count, **options)
    MPI.COMM_WORLD.Barrier()
    return found


def fail(*_: object) -> Any:
    raise ArithmeticError("the user's")


class Backward(torch.autograd.Function):
    """Whose backward pass fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(_: Any, _g: Tensor) -> Any:
        fail()


def through(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, fail):
        return x.pow(2)


def hooked(x: Tensor, register: str) -> Tensor:
    getattr(x, register)(fail)
    return x


def nested(x: Tensor) -> Tensor:
    def inner(_: Tensor) -> None:
        with torch.enable_grad():
            Backward.apply(x.detach().requires_grad_()).sum().backward()

    x.register_hook(inner)
    return x


MOMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": Backward.apply,
    "a saved tensor": through,
    "a hook of a tensor": lambda q: hooked(q * 2, "register_hook"),
    "a hook of a node": lambda q: hooked_node(q * 2),
    "a hook of the parameter": lambda q: hooked(q, "register_hook"),
    "a hook after ours": lambda q: hooked(q, "register_post_accumulate_grad_hook"),
    "a pass within": nested,
}


def hooked_node(x: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(fail)
    return x


ENDED, UNDER_WAY = "an exception has ended its backward pass", "gradients are still being reduced"
# What the rank does then, in vain, and the cause that all read.
THEN: dict[str, tuple[Callable[[Any, Any], object] | None, str]] = {
    "nothing": (None, ENDED),
    "a pass": (lambda p, _: push(p), UNDER_WAY),
    "zero_grad": (lambda _, optimizer: optimizer.zero_grad(), UNDER_WAY),
    "step": (lambda _, optimizer: optimizer.step(), ENDED),
}
MOMENTS_AND_THEN = [(moment, then) for moment in MOMENTS for then in ("nothing", "a pass")]
MOMENTS_AND_THEN += [("a hook of a tensor", then) for then in ("zero_grad", "step")]


@pytest.mark.parametrize("options", ["plain", "views"])
@pytest.mark.parametrize(("moment", "then"), MOMENTS_AND_THEN)
def test_a_pass_that_fails_after_it_has_sent(moment: str, then: str, options: str) -> None:
    (p, q), optimizer = made(2, **OPTIONS[options])
    act, cause = THEN[then]
    if late():
        loss: Any = MOMENTS[moment](q).sum() + p.sum() * 3  # what was made last comes first
        with pytest.raises(ArithmeticError, match="the user's"):
            loss.backward()
        if act:
            with pytest.raises(hvd.FarandoleError, match=cause):
                act(p, optimizer)
            with pytest.raises(hvd.ShutdownError):
                push(p)
    else:
        with pytest.raises(hvd.PeerError, match=rf"rank {hvd.size() - 1} left: .*{cause}"):
            push_each((p, 0), (q, 1))
    MPI.COMM_WORLD.Barrier()  # without `act` no call of farandole: the peers have heard
    assert part.has_ended() == late()
    check_ended(lambda: hvd.allreduce(torch.ones(1)), cause)


def failing(p: Tensor, q: Tensor) -> None:
    """A pass that ends after p's gradient has arrived."""
    with pytest.raises(ArithmeticError):
        (hooked(q * 2, "register_hook").sum() + p.sum() * 3).backward()


def test_a_gradient_of_another_form_meets_autograd_s_error() -> None:
    (p, q), _ = made(2)
    if late():
        p.grad = torch.ones(4)
        p.grad.data = torch.ones(6)
        with pytest.raises(RuntimeError):
            push_each((p, 0), (q, 0))
    MPI.COMM_WORLD.Barrier()
    if late() and not part.has_ended():  # p came first: the pass has sent nothing
        part.end(RuntimeError("as autograd says"))
    check_ended(lambda: push_each((p, 0), (q, 0)), "optimizer|autograd")


def test_a_pass_that_fails_behind_a_reentrant_checkpoint() -> None:
    """Whose graph is kept."""
    (p,), optimizer = made()
    x = torch.ones(4, requires_grad=True)
    middle: Any = checkpoint(lambda x: x + p, x, use_reentrant=True)
    loss: Any = checkpoint(lambda x: x + p, middle, use_reentrant=True).sum()
    if late():
        middle.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss.backward()
        with pytest.raises(hvd.FarandoleError, match=ENDED):
            optimizer.step()
    check_ended(loss.backward, ENDED)


@pytest.mark.parametrize("moment", ["step", "step_pre_hook", "step_post_hook"])
def test_an_exception_in_a_step(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (p,), optimizer = made()
    push(p)
    MPI.COMM_WORLD.Barrier()
    if late():
        with monkeypatch.context() as patched:
            if moment == "step":
                patched.setattr(torch.optim.SGD, "step", fail)
            else:
                getattr(optimizer, f"register_{moment}")(fail)
            with pytest.raises(ArithmeticError):
                optimizer.step()
        with pytest.raises(hvd.ShutdownError, match="ArithmeticError: the user's"):
            optimizer.step()
    check_ended(lambda: push(p), "ArithmeticError: the user's")


class Fails:
    """A compressor that can't restore a result."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 1, None

    @staticmethod
    def decompress(tensor: Tensor, _context: Any) -> Tensor:
        return fail() if late() else tensor


def test_a_result_that_can_not_be_restored() -> None:
    (p,), _ = made(compression=Fails)
    if late():
        with pytest.raises(ArithmeticError):
            push(p)
    else:
        push(p)
    check_ended(hvd.barrier, "ArithmeticError: the user's")


def test_no_thread_for_adasum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have begun its rounds already."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    x = torch.arange(4.0) + hvd.rank()
    if late():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                hvd.allreduce(x, op=hvd.Adasum, name="adasum")
    check_ended(lambda: hvd.allreduce(x, op=hvd.Adasum, name="adasum"), "can't start new thread")


def test_what_ends_nothing() -> None:
    """Exceptions before anything is sent, wrong arguments, and limits of waits."""
    (p, q), optimizer = made(2)
    push_each((p, 0), (q, 1))
    if late():
        with pytest.raises(ArithmeticError):
            optimizer.step(fail)
    optimizer.zero_grad()
    with optimizer.no_sync():
        failing(p, q)
    optimizer.zero_grad()
    if late():
        with pytest.raises(ArithmeticError):  # no gradient has arrived
            hooked(p * 2, "register_hook").sum().backward()
    with pytest.raises((ValueError, hvd.MismatchError)):
        hvd.allreduce(torch.ones(3 if late() else 4), name="shapes")
    if not late():
        with pytest.raises(hvd.StallError):
            hvd.allreduce_async(torch.ones(3), name="late").wait(timeout=0.01)
    MPI.COMM_WORLD.Barrier()
    if late():
        hvd.allreduce(torch.ones(3), name="late")
    push_each((p, 0), (q, 1))
    grad_is(p, total(hvd.Average, [0]))
    grad_is(q, total(hvd.Average, [1]))
    optimizer.step()
