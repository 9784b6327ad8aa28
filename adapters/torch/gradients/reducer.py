# SPDX-License-Identifier: Apache-2.0
"""The Reducer, which reduces all gradients of one DistributedOptimizer.

Its work starts in hooks on autograd's threads, and ends at the end of the backward pass or in
step().
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref
from zlib import crc32

import torch
from torch import Tensor

from farandole.calls import leases, part, requests
from farandole.calls.requests import Call, Op
from farandole.equality import ModelCheck
from farandole.errors import FarandoleError, warn
from farandole.ops import Average, Sum
from farandole.torch import cuda
from farandole.torch.arguments import Settings
from farandole.torch.bucket_view import lay_out
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.gradient import Gradient, send_together
from farandole.torch.gradients.passes import Accumulation, is_compiled, pass_of, task_id
from farandole.torch.gradients.round import Consensus, Round, RoundState, no_pass, outcome
from farandole.torch.models import REMEDIES, model_of
from farandole.torch.strides import like_gradient

_taken, _parameter = attrgetter("grad"), attrgetter("parameter")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_set_grad: Any = _base.grad.__set__

_NAMED = 4  # largest number of parameters that an error text names
_serials = count()
# Maps a parameter's id to the parameter's Gradient in the newest optimizer that has the parameter.
# Only that optimizer reduces the gradient.
_newest: WeakValueDictionary[int, Gradient] = WeakValueDictionary()
_all: WeakSet[Reducer] = WeakSet()


class Reducer:
    """Reduces the gradients of one optimizer, round by round.

    The first gradient of a backward pass opens a round, and the end of the pass closes it. If no
    pass closes the round, step() does. If autograd accumulates a gradient again in the same pass,
    after it was sent, another round reduces it. The consensus tells all ranks that there must be
    another round.

    A round ends in one of four ways:
    - _finish() delivers the results.
    - fail() is called because this rank cannot complete the round. The round fails on all ranks,
      which may then continue.
    - drop() is called because the round has failed on all ranks or the runtime has ended.
    - leave_if_open() is called because no rank can complete the round. This rank leaves the job.

    Hooks may run on several threads. `lock` lets only one of them at a time send or close.
    """

    def __init__(
        self, settings: Settings, accumulation: Accumulation, optimizer: torch.optim.Optimizer
    ) -> None:
        """`accumulation` decides which passes reduce. Ranks compare the settings of `optimizer`."""
        self.settings = settings
        self.accumulation = accumulation
        self._whose = whose = ref(optimizer)
        self._equality = ModelCheck(
            lambda: model_of([(g.name, g.parameter) for g in self.gradients], whose()),
            *(settings.ranks, settings.verify, REMEDIES),
        )
        self.serial = next(_serials)  # grows in the same order on all ranks
        self.gradients: list[Gradient] = []
        self.taken = ""  # name of a parameter that a newer optimizer reduces; "" if there is none
        self.lock = threading.RLock()
        self.round = Round()
        # In a mixed world of an elastic job, new ranks have created fewer optimizers than
        # survivors. An optimizer therefore gets its name when it is first used.
        self._enter_world(0 if requests.is_mixed() else requests.world())
        _all.add(self)

    def _enter_world(self, world: int) -> None:
        """Names the calls for `world`. If it is 0, choose_name() will name them later."""
        self.consensus = Consensus(self.settings.process_set, world)
        self.named = 0  # see RoundState
        self._steps: Counter[int] = Counter()  # step() calls, by number of earlier join() calls
        self._equality.restart()

    # ---- parameters

    def add(self, parameters: Iterable[Tensor], names: Iterable[str]) -> None:
        """Starts to reduce the gradients of these parameters.

        If an older optimizer has one of the parameters, that optimizer no longer reduces. Raises
        LibraryError, and changes nothing, if memory is short.
        """
        pairs = zip(parameters, names, strict=True)
        new = [Gradient(self, p, name, self._encoding(name)) for p, name in pairs]
        if self.settings.views:
            lay_out(new)  # first, because memory may be short
        for gradient in new:
            parameter = gradient.parameter
            if (older := _newest.get(id(parameter))) is not None:
                older.reducer.forget()
            if (older := _newest.get(id(parameter))) is not None:
                older.reducer.detach("a newer optimizer has taken its parameters")
                older.reducer.taken = older.name
            _newest[id(parameter)] = gradient
            self.gradients.append(gradient)
            gradient.install_hook()

    def _encoding(self, name: str) -> Encoding:
        s, scope = self.settings, self.consensus.scope
        call = Call(
            *(Op.ALLREDUCE, f"{scope}.{name}", s.process_set, s.reduce_op, s.prescale, s.postscale)
        )
        return Encoding(call, s.compressor, s.sparse_as_dense)

    def detach(self, why: str = "its optimizer is gone") -> None:
        """Removes all hooks. If a round is open, this rank leaves the job."""
        for gradient in self.gradients:
            _release(gradient)
        if self.round.open:
            if self.round.handles is None:  # peers wait for gradients that this rank will not send
                part.end(self._unfinished(why))
            self.drop()

    def forget(self) -> None:
        """Stops reducing the gradients of parameters that have left the optimizer's groups.

        Does nothing during a round. All ranks must call this at the same point of the program. It
        is called by step(), and by add() of an optimizer that takes over a parameter.
        """
        if self.round.open or (optimizer := self._whose()) is None:
            return
        present = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for gradient in self.gradients:
            if id(gradient.parameter) not in present:
                _release(gradient)
        self.gradients = [g for g in self.gradients if id(g.parameter) in present]

    def check_usable(self) -> None:
        """Raises an error if this optimizer can no longer reduce.

        Raises ShutdownError if this rank has left the job, and RuntimeError if a newer optimizer
        has taken one of the parameters.
        """
        part.check()
        if self.taken:
            raise RuntimeError(
                f"{self.consensus.scope}: {self.taken} also belongs to a newer "
                "DistributedOptimizer, and only that one reduces it. Make one optimizer of all "
                "parameters, with a group for each setting, or give each optimizer different "
                "parameters. If you have replaced this optimizer, do not use it any more"
            )

    # ---- backward passes

    def enter_pass(self, parameter: Tensor) -> Round:
        """Starts a round. The first hook of an outermost pass calls this with the hook's parameter.

        Raises ValueError on all ranks if new gradients cannot be added to reduced ones.
        """
        with self.lock:
            if self.round.inside() is None:
                self.leave_if_open("another backward pass has started")
                self.round = now = Round()
                self.accumulation.complete = False
                if (task := task_id()) < 0:  # not in autograd's engine: step() will reduce
                    return now
                if is_compiled() and not self.accumulation.holding:
                    raise self.fail(
                        ValueError(
                            f"{self.consensus.scope}: compiled autograd does not report the end "
                            "of a backward pass: set torch._dynamo.config.compiled_autograd to "
                            "False, or call backward() within no_sync(); step() then reduces"
                        )
                    )
                inside = pass_of(task).add(self)
                sending = self._begin_pass(parameter)
                now.inside, now.sending = inside, sending  # last: hooks on other threads read them
            return self.round

    def _begin_pass(self, parameter: Tensor) -> bool:
        """Counts the pass. Returns True if hooks must send gradients as they are accumulated."""
        accumulation, now = self.accumulation, self.round
        if accumulation.reduced and not self.settings.is_linear:
            # The model's own zero_grad() may have reset all gradients.
            others = [g.parameter.grad for g in self.gradients if g.parameter is not parameter]
            accumulation.reduced = not others or any(grad is not None for grad in others)
        now.closing = accumulation.begin_pass()
        if torch.is_grad_enabled():
            warn(
                "backward(create_graph=True): `.grad` is the reduced gradient, but its derivatives "
                "are this rank's. Reduce what you compute from them; with an optimizer that uses "
                "them in step(), such as AdaHessian, the ranks' models would differ",
                UserWarning,
            )
        # In a mixed world, an optimizer gets its name at the end of a pass. Without a name, it can
        # send its gradients only then.
        sending = now.closing and (self.has_name or not requests.is_mixed())
        if sending:
            self.open_round()
        return sending

    def end_pass(self) -> None:
        """Closes the round if the pass reduces. Call this at the end of the outermost pass."""
        self.round.inside = no_pass
        if self.round.closing:
            self.close(at_step=False)

    @property
    def has_name(self) -> bool:
        """True if this optimizer's calls have names in the present world."""
        return self.consensus.world == requests.world()

    def choose_name(self, together: int) -> None:
        """Names this optimizer's calls.

        Names follow the order in which optimizers are first used in this world. That order is the
        same on all ranks. `together` is the number of optimizers that get a name now.
        """
        self._enter_world(requests.world())
        self.named = together
        for gradient in self.gradients:
            gradient.encoding = self._encoding(gradient.name)
        if self.settings.views:  # the earlier world's memory may no longer be shared
            lay_out(self.gradients)

    # ---- rounds

    def open_round(self) -> None:
        """Prepares the round for its first gradient.

        Raises ValueError on all ranks if gradients are already reduced and new ones cannot be
        added.
        """
        if not self.has_name:
            self.choose_name(int(requests.is_mixed()))
        self.consensus.begin()
        self.round.open = True
        if self.accumulation.reduced and not self.settings.is_linear:
            text = (
                f"{self.consensus.scope}: gradients are reduced already, and another pass can add "
                "to averages only: first call step() or optimizer.zero_grad(), or use no_sync() or "
                "backward_passes_per_step"
            )
            raise self.fail(ValueError(text))

    def send_batch(self) -> None:
        """Sends the gradients that hooks have taken but not sent.

        If the core refuses them, raises the core's error on all ranks.
        """
        with self.lock:
            now = self.round
            batch, now.batch = now.batch, []
            if batch and (failure := send_together(batch, now)):
                raise self.fail(failure)

    def close(self, at_step: bool) -> None:
        """Sends the gradients that no hook has sent, then submits the consensus. Does not wait.

        `at_step` is True if step() closes the round.
        """
        now, process_set = self.round, self.settings.process_set
        if now.handles is not None:
            return
        if not now.open:
            self.open_round()
        self.send_batch()
        if len(now.sent) < len(self.gradients):
            for gradient in self.gradients:
                gradient.install_hook()
                if gradient not in now.sent and gradient.takes_part():
                    gradient.send()
        joins, every = requests.joins[process_set], self._equality.every
        steps = self._steps[joins]
        model = self._equality.digest(joins, steps) if every and steps % every == 0 else 0
        checksum, own_part = self._sent_parameters()
        state = RoundState(
            late=int(now.late),
            sparse=now.sparse,
            at_step=int(at_step and not now.closing),
            steps=steps,
            parameters=checksum,
            named=self.named,
            model=model,
        )
        own = self.consensus.submit(state, own_part)
        now.handles = leases.numbers_of([*now.sent.values(), own])
        now.sending = now.closing = False
        self.named = 0

    def _sent_parameters(self) -> tuple[int, str]:
        """Returns a checksum of the parameters whose gradients were sent, and a text about them."""
        total, sent = len(self.gradients), self.round.sent
        if len(sent) == total:
            return total, f"all its {total}"
        missing = [i for i, gradient in enumerate(self.gradients) if gradient not in sent]
        names = [self.gradients[i].name for i in missing]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        text = f"{len(sent)} of its {total}, without {', '.join(names[:_NAMED])}{more}"
        return (crc32(repr(missing).encode()) << 24) + total, text

    def synchronize(self, at_step: bool = False) -> None:
        """Blocks until every parameter's `.grad` is reduced and equal on all ranks.

        Does nothing if no gradient was accumulated since the last reduction. `at_step` is True if
        step() calls this. Only one thread at a time may call this.
        """
        with self.lock:
            self.check_usable()
            # A retained graph may keep the pass alive after its task has ended.
            if self.round.inside is not no_pass and (self.round.inside() is None or task_id() < 0):
                self.leave_if_open("an exception has ended its backward pass")
            try:
                while not self.accumulation.is_complete():
                    self.close(at_step)
                    self._finish()
            except Exception:
                raise
            except BaseException as reason:
                part.end(reason)
                raise

    def _finish(self) -> None:
        """Waits until the closed round has ended, then raises the round's error."""
        now, scope = self.round, self.consensus.scope
        state = self._wait()
        final = not (state.late or state.sparse)
        now.again |= not final
        try:
            complaint = self._deliver(final)
        except FarandoleError:  # all ranks received the same sparse rows, so all raise this error
            self.drop()
            raise
        except BaseException as reason:  # this rank only, for example from a user's decompress()
            part.end(reason)
            raise
        if state.sparse:  # reports one gradient; if there are others, later rounds report them
            g = self.gradients[state.sparse >> 8]
            g.encoding = g.encoding.rows(like_gradient(g.parameter), state.sparse & 0xFF)
        self.round = Round(again=not final)
        if final:
            # Before the round, a user's hook may have called step() and reset all gradients.
            reduced = any(g.parameter.grad is not None for g in self.gradients)
            self.accumulation.restart(reduced, complete=True)
        leases.end(now.handles)
        if complaint is not None:
            raise RuntimeError(f"{scope}: {complaint}")
        if state.model:
            self._equality.report()

    def _wait(self) -> RoundState:
        """Waits for the consensus, then for all gradients.

        If the round has failed, raises the round's error. The round has then ended on all ranks.
        """
        now, consensus, handles = self.round, self.consensus, self.round.handles
        state = consensus.wait(handles[len(handles) - 1])
        if isinstance(state, Exception):
            raise self.fail(state)
        if state.model:
            self._equality.compare(
                consensus.scope, state.model, consensus.equal_models, state.steps
            )
        failure = outcome(handles)
        if cuda.device >= 0 and failure is None:
            cuda.join([*now.sent.values()], now.sent)
        if state.late and self.settings.reduce_op not in (Average, Sum):
            failure = failure or ValueError(
                f"{consensus.scope}: a gradient was accumulated several times in one backward "
                "pass, as with reentrant checkpoints; only op Average and Sum support this: use "
                "checkpoint(..., use_reentrant=False)"
            )
        if failure is not None:
            self.drop()
            raise failure
        return state

    @torch.no_grad()
    def _deliver(self, final: bool) -> str | None:
        """Stores the results in `.grad`. Returns the text of the first error, or None."""
        now, plain = self.round, self.round.plain
        rest = now.sent.items()
        if not now.again:
            with suppress(RuntimeError):  # if a parameter's form has changed, deliver one by one
                deque(map(_set_grad, map(_parameter, plain), map(_taken, plain)), 0)
                for gradient in plain:
                    gradient.grad = None
                if len(plain) == len(rest):
                    return None
                rest = {g: n for g, n in rest if g.encoded is not None}.items()
        texts = [gradient.deliver(handle, final) for gradient, handle in rest]
        return next(filter(None, texts), None)

    # ---- failures

    def fail(self, reason: Exception, whose: str = "") -> Exception:
        """Makes the round fail on all ranks, because this rank cannot complete it.

        Returns `reason`. If `whose` is given, the error's text names that parameter. This rank
        refuses each call that it has not made, so every rank has made or refused every call.
        Therefore no rank waits for another, and all names are free for the next round.
        """
        if whose:
            with suppress(TypeError):  # the error's constructor may take other arguments
                reason = type(reason)(f"the gradient of {whose}: {reason}")
        calls = [self.consensus.call] if self.round.handles is None else []
        calls += [g.encoding.call for g in self.gradients if not self.round.sent.get(g)]
        requests.refuse_all(calls, reason)
        self.drop()
        return reason

    def drop(self) -> None:
        """Ends a failed round without results.

        The next round first waits until this round's calls have ended. They will end, because every
        rank has made or refused each of them.
        """
        now = self.round
        handles = now.sent.values() if now.handles is None else now.handles
        numbers = [*filter(None, handles)]
        leases.drop(numbers)
        self.consensus.left += numbers
        for gradient in self.gradients:
            gradient.drop()
        self.accumulation.restart(self.accumulation.reduced)
        self.named = 0
        self.round = Round()

    def leave_if_open(self, why: str) -> None:
        """If a round is open, ends this rank's part in the job and raises an error.

        Call this when no rank can complete that round any more.
        """
        if self.round.open:
            part.check()
            reason = self._unfinished(why)
            part.end(reason)
            raise reason

    def on_pass_lost(self, inside: object) -> None:
        """Called when an exception has ended the pass `inside`.

        Does the same as leave_if_open(), but a moment later. If the exception ends the program
        meanwhile, peers receive that exception as the cause.
        """
        now, world = self.round, requests.world()
        if now.inside is not inside:
            return
        now.sending = False
        if now.open:
            part.end_soon(
                self._unfinished("an exception has ended its backward pass"),
                lambda: self.round is now and requests.world() == world,
            )

    def _unfinished(self, why: str) -> FarandoleError:
        return FarandoleError(f"{self.consensus.scope}: gradients are still being reduced: {why}")

    # ---- between passes

    def reset(self) -> None:
        """Restarts the counts. zero_grad() calls this."""
        self.leave_if_open("zero_grad() was called")
        self.accumulation.restart(reduced=False)
        for gradient in self.gradients:
            gradient.install_hook()

    def on_stepped(self) -> None:
        """Counts a step. Call this after the optimizer's own step."""
        self.accumulation.restart(reduced=False)
        self._steps[requests.joins[self.settings.process_set]] += 1


def _release(gradient: Gradient) -> None:
    if gradient.remove_hook is not None:
        gradient.remove_hook()
        gradient.pin = None
    if _newest.get(id(gradient.parameter)) is gradient:
        del _newest[id(gradient.parameter)]


def _drop_all() -> None:
    for reducer in list(_all):
        if reducer.round.open:
            reducer.drop()


requests.on_restart(_drop_all)  # rounds end with the runtime
