# SPDX-License-Identifier: Apache-2.0
"""The reducer: all gradients of one optimizer, from hooks (autograd's threads) to the end of the
backward pass or to step(). Used by DistributedOptimizer; a lock lets one thread at a time close a
round, another one send. Passes: which backward passes reduce; Pass: an outermost one, whose end
closes the rounds within backward() itself."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor

from farandole.calls import leases, part, requests
from farandole.calls.requests import Call, Op
from farandole.equality import Equality
from farandole.errors import FarandoleError, without_frames
from farandole.ops import Average, Sum
from farandole.torch import cuda
from farandole.torch.arguments import Settings
from farandole.torch.bucket_view import lay_out
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.gradient import Gradient, send_together
from farandole.torch.gradients.round import Consensus, Round, RoundState, no_pass, outcome
from farandole.torch.models import REMEDIES, model_of
from farandole.torch.strides import like_gradient

_taken, _parameter = attrgetter("grad"), attrgetter("parameter")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_set_grad: Any = _base.grad.__set__

_task_id: Callable[[], int] = torch._C._current_graph_task_id
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_at_end: Callable[[Callable[[], None]], None]
_at_end = torch.autograd.Variable._execution_engine.queue_callback

_serials = count()
# By the parameter's id: the gradient of the newest optimizer that has it, which alone reduces it.
_newest: WeakValueDictionary[int, Gradient] = WeakValueDictionary()
_all: WeakSet[Reducer] = WeakSet()


class Passes:
    """Which passes of an optimizer reduce; counted from each reduction, step or reset on."""

    __slots__ = ("complete", "counted", "holding", "reduced", "wanted")

    def __init__(self, wanted: int) -> None:
        """`wanted`: passes until one reduces, without those in no_sync()."""
        self.wanted = wanted
        self.holding = False  # no_sync(): gradients stay local
        self.restart(reduced=False)

    def restart(self, reduced: bool, complete: bool = False) -> None:
        """Counts from 0. `reduced`: gradients are, since the last step() or zero_grad();
        `complete`: nothing has arrived since."""
        self.counted, self.reduced, self.complete = 0, reduced, complete

    def begin(self) -> bool:
        """Counts a pass; returns whether it reduces."""
        self.complete = False
        self.counted += not self.holding
        return not self.holding and self.counted >= self.wanted


class Pass:
    """An outermost backward pass, and the Reducers that something arrives for in it.

    Autograd runs each pass as a task, and ends one that is running alone. A nested one, as
    reentrant checkpointing runs, is a node of the task around it: the nodes behind that node hand
    the end on, or, where a hook of a leaf has run it, that node itself. Only autograd keeps this
    object alive: it goes with the task, so an exception that has ended the pass ends it too.
    """

    __slots__ = ("__weakref__", "_reducers")

    def __init__(self) -> None:
        self._reducers: dict[Reducer, None] = {}

    def add(self, reducer: Reducer) -> ref[Pass]:
        """Lets the reducer take part in its end, and hear if an exception ends it. No `__del__`:
        Python drops a Ctrl-C that comes there."""
        self._reducers[reducer] = None
        return ref(self, reducer.broken_off)

    def ended(self) -> None:
        """Called by autograd when a task is over. All rounds are closed before one is waited for,
        in an order that is equal on all ranks."""
        node = _node()
        if node is None:
            reducers = sorted(self._reducers, key=attrgetter("serial"))
            self._reducers = {}
            new = [r for r in reducers if r.now.closing and not r.has_name]
            for reducer in new:
                reducer.choose_name(len(new))
            try:
                for reducer in reducers:
                    reducer.end_pass()
                for reducer in reducers:
                    if reducer.now.open:
                        reducer.synchronize()
            except Exception as reason:  # the other rounds of the pass end with it
                for reducer in reducers:
                    if reducer.now.open:
                        reducer.refuse(reason)
                raise without_frames(reason)  # noqa: B904  # the same one
            return
        behind = [n for n, _ in node.next_functions if n is not None]
        for hooks in [n.register_prehook for n in behind] or [node.register_hook]:
            self._hand_on(hooks)

    def _hand_on(self, register: Callable[[Callable[..., None]], Any]) -> None:
        def call(*_gradients: Any) -> None:
            hook.remove()
            around = _pass_of(_task_id(), self)
            if around is not self:
                for reducer in self._reducers:
                    reducer.now.inside = around.add(reducer)
                self._reducers = {}

        hook = register(call)


_passes: WeakValueDictionary[int, Pass] = WeakValueDictionary()  # by autograd's task


def _pass_of(task: int, new: Pass | None = None) -> Pass:
    """The pass that a task, which is running, belongs to as far as is known; else a new one."""
    found = _passes.get(task)
    if found is None:
        found = new or Pass()
        _at_end(found.ended)
        _passes[task] = found
    return found


class Reducer:
    """Reduces gradients round by round, in backward passes; step() closes what no pass has closed.

    Gradients that arrive after theirs were sent are reduced in another round of the same pass; all
    ranks learn that by the consensus.
    """

    def __init__(
        self, settings: Settings, passes: Passes, optimizer: torch.optim.Optimizer
    ) -> None:
        """`passes`: which of them reduce; `optimizer`: whose settings are compared."""
        self.settings = settings
        self.passes = passes
        whose = ref(optimizer)
        self._equality = Equality(
            lambda: model_of([(g.name, g.parameter) for g in self.gradients], whose()),
            *(settings.ranks, settings.verify, REMEDIES),
        )
        self.serial = next(_serials)  # equal on all ranks, up to a constant
        self.gradients: list[Gradient] = []
        self.taken = ""  # a parameter that a newer optimizer has
        self.lock = threading.RLock()
        self.now = Round()
        # In a mixed world a survivor has made its optimizers before: there the first use counts.
        self._start(0 if requests.is_mixed() else requests.world())
        _all.add(self)

    def _start(self, world: int) -> None:
        """Chooses the name of its calls, for this world; 0: that follows."""
        self.consensus = Consensus(self.settings.process_set, world)
        self.named = 0  # as in RoundState
        self._steps: Counter[int] = Counter()  # step() calls, by join() calls before them
        self._equality.restart()

    # ---- parameters

    def add(self, parameters: Iterable[Tensor], names: Iterable[str]) -> None:
        """Begins to reduce parameters' gradients. Ends the reducers of older optimizers that have
        some of them."""
        begin = len(self.gradients)
        for parameter, name in zip(parameters, names, strict=True):
            gradient = Gradient(self, parameter, name, self._encoding(name))
            if (older := _newest.get(id(parameter))) is not None:
                older.reducer.detach("a newer optimizer has taken its parameters")
                older.reducer.taken = older.name
            _newest[id(parameter)] = gradient
            self.gradients.append(gradient)
            gradient.hook()
        if self.settings.views:
            lay_out(self.gradients[begin:])

    def _encoding(self, name: str) -> Encoding:
        s, scope = self.settings, self.consensus.scope
        call = Call(
            *(Op.ALLREDUCE, f"{scope}.{name}", s.process_set, s.reduce_op, s.prescale, s.postscale)
        )
        return Encoding(call, s.compressor, s.sparse_as_dense)

    def detach(self, why: str = "its optimizer is gone") -> None:
        """Ends the reducer."""
        for gradient in self.gradients:
            if gradient.remove is not None:
                gradient.remove()
            if _newest.get(id(gradient.parameter)) is gradient:
                del _newest[id(gradient.parameter)]
        if self.now.open:
            if self.now.handles is None:  # the others wait for what this rank does not send
                part.end(self._unfinished(why))
            self.abandon()

    def check_own(self) -> None:
        """Raises ShutdownError if this rank's part in the job has ended, and RuntimeError if
        another optimizer has a parameter too."""
        part.check()
        if self.taken:
            raise RuntimeError(
                f"{self.consensus.scope}: {self.taken} is in a newer DistributedOptimizer too, and "
                "one optimizer alone reduces a parameter: make one optimizer of all parameters, "
                "with a group for each setting, or give each optimizer its own; an older one that "
                "was replaced is not used any more"
            )

    # ---- backward passes

    def enter(self, parameter: Tensor) -> Round:
        """To be called by the first hook of an outermost pass, that of this parameter.

        Raises ValueError, on all ranks, if gradients that were reduced before can't be added to.
        """
        with self.lock:
            if self.now.inside() is None:
                self.give_up("another backward pass has started")
                self.now = now = Round()
                self.passes.complete = False
                if (task := _task_id()) < 0:  # no pass of autograd's engine: step() will reduce
                    return now
                inside = _pass_of(task).add(self)
                sending = self._begin_pass(parameter)
                now.inside, now.sending = inside, sending  # at last: other threads' hooks see it
            return self.now

    def _begin_pass(self, parameter: Tensor) -> bool:
        """Counts the pass; returns whether gradients are sent as they arrive."""
        passes, now = self.passes, self.now
        if passes.reduced and not self.settings.is_linear:
            # Or has the model's own zero_grad() reset all?
            others = [g.parameter.grad for g in self.gradients if g.parameter is not parameter]
            passes.reduced = not others or any(grad is not None for grad in others)
        now.closing = passes.begin()
        # In a mixed world names would depend on the order in which gradients arrive.
        sending = now.closing and (self.has_name or not requests.is_mixed())
        if sending:
            self.begin()
        return sending

    def end_pass(self) -> None:
        """Closes the pass's round, if it reduces. To be called at the end of the outermost pass."""
        self.now.inside = no_pass
        if self.now.closing:
            self.close(at_step=False)

    @property
    def has_name(self) -> bool:
        """True if its calls have their name in this world."""
        return self.consensus.world == requests.world()

    def choose_name(self, together: int) -> None:
        """Names its calls, by the order in which the ranks of this world use optimizers: whatever
        a rank did before, it is equal on all. `together`: as RoundState.named."""
        self._start(requests.world())
        self.named = together
        for gradient in self.gradients:
            gradient.encoding = self._encoding(gradient.name)
        if self.settings.views:  # an earlier job's memory may no longer be shared
            lay_out(self.gradients)

    # ---- rounds

    def begin(self) -> None:
        """To be called before the first gradient of a round is sent. Raises ValueError, on all
        ranks, if its results can't be added to those of the step's last one."""
        if not self.has_name:
            self.choose_name(int(requests.is_mixed()))
        self.consensus.begin()
        self.now.open = True
        if self.passes.reduced and not self.settings.is_linear:
            text = (
                f"{self.consensus.scope}: gradients are reduced already, and only to averages "
                "more can be added: call step() or optimizer.zero_grad() before, or use no_sync() "
                "or backward_passes_per_step"
            )
            raise self.refuse(ValueError(text))

    def send(self) -> None:
        """Sends what was taken and waits to be sent. Raises the core's error, on all ranks."""
        with self.lock:
            now = self.now
            batch, now.batch = now.batch, []
            if batch and (failure := send_together(batch, now)):
                raise self.refuse(failure)

    def close(self, at_step: bool) -> None:
        """Sends the rest of the round and submits the consensus; does not wait. `at_step`: step()
        does it."""
        now, process_set = self.now, self.settings.process_set
        if now.handles is not None:
            return
        if not now.open:
            self.begin()
        self.send()
        if len(now.sent) < len(self.gradients):
            for gradient in self.gradients:
                gradient.hook()
                if gradient not in now.sent and gradient.wanted():
                    gradient.take()
                    gradient.send()
        joins, every = requests.joins[process_set], self._equality.every
        steps = self._steps[joins]
        equal = int(at_step and not now.closing), steps, len(now.sent), self.named
        model = self._equality.digest(joins, steps) if every and steps % every == 0 else 0
        own = self.consensus.submit(RoundState(int(now.late), now.sparse, *equal, model))
        now.handles = leases.numbers_of([*now.sent.values(), own])
        now.sending = now.closing = False
        self.named = 0

    def synchronize(self, at_step: bool = False) -> None:
        """Blocks until `.grad` of all parameters is reduced: equal on all ranks.

        Nothing is done if nothing has arrived since the last time; `at_step`: step() does it. One
        thread at a time.
        """
        with self.lock:
            self.check_own()
            # A graph that is kept may keep the Pass.
            if self.now.inside is not no_pass and (self.now.inside() is None or _task_id() < 0):
                self.give_up("an exception has ended its backward pass")
            try:
                while not self.passes.complete:
                    self.close(at_step)
                    self._finish()
            except Exception:
                raise
            except BaseException as reason:
                part.end(reason)
                raise

    def _finish(self) -> None:
        """Ends the round that was closed. Raises its error, after which there is none."""
        now, consensus, handles = self.now, self.consensus, self.now.handles
        heard = consensus.hear(handles[len(handles) - 1])
        if isinstance(heard, Exception):
            raise self.refuse(heard)
        if heard.model:
            equal = consensus.equal_models
            self._equality.heard(consensus.scope, heard.model, equal, heard.steps)
        if failure := outcome(handles):
            self.abandon()
            raise failure
        if cuda.device >= 0:
            cuda.join([*now.sent.values()], now.sent)
        if heard.late and self.settings.reduce_op not in (Average, Sum):
            self.abandon()
            raise ValueError(
                f"{consensus.scope}: gradients have arrived several times in one backward pass, as "
                "with reentrant checkpoints, and only op Average and Sum can be taken of each: use "
                "checkpoint(..., use_reentrant=False)"
            )
        final = not (heard.late or heard.sparse)
        now.again |= not final
        try:
            complaint = self._deliver(final)
        except FarandoleError:  # of rows that all ranks have received
            self.abandon()
            raise
        except BaseException as reason:  # as a user's decompress() raises: here alone
            part.end(reason)
            raise
        if heard.sparse:  # one gradient; the next round tells of the others
            g = self.gradients[heard.sparse >> 8]
            g.encoding = g.encoding.rows(like_gradient(g.parameter), heard.sparse & 0xFF)
        self.now = Round(again=not final)
        if final:
            self.passes.restart(reduced=True, complete=True)
        leases.end(handles)
        if complaint is not None:
            raise RuntimeError(complaint)
        if heard.model:
            self._equality.tell()

    @torch.no_grad()
    def _deliver(self, final: bool) -> str | None:
        """Puts the results into `.grad`; returns the first error's text."""
        now, plain = self.now, self.now.plain
        rest = now.sent.items()
        if not now.again:
            with suppress(RuntimeError):  # a parameter's form has changed: one by one, then
                deque(map(_set_grad, map(_parameter, plain), map(_taken, plain)), 0)
                for gradient in plain:
                    gradient.grad = None
                if len(plain) == len(rest):
                    return None
                rest = {g: n for g, n in rest if g.encoded is not None}.items()
        texts = [gradient.deliver(handle, final) for gradient, handle in rest]
        return next(filter(None, texts), None)

    # ---- failures

    def refuse(self, reason: Exception, whose: str = "") -> Exception:
        """Ends the round on all ranks, since this one can't go on. Returns the error, which names
        the gradient.

        Every rank sends or refuses every gradient of a round that fails: so none waits for another,
        and all names are free for the next round.
        """
        if whose:
            with suppress(TypeError):  # a class whose exceptions take other arguments
                reason = type(reason)(f"the gradient of {whose}: {reason}")
        calls = [self.consensus.call] if self.now.handles is None else []
        calls += [g.encoding.call for g in self.gradients if not self.now.sent.get(g)]
        requests.refuse_all(calls, reason)
        self.abandon()
        return reason

    def abandon(self) -> None:
        """Ends the round without results: leaves all handles under way to leases, and to the next
        round, which waits for them, as all ranks complete or refuse them."""
        now = self.now
        handles = now.sent.values() if now.handles is None else now.handles
        numbers = [*filter(None, handles)]
        leases.drop(numbers)
        self.consensus.left += numbers
        for gradient in self.gradients:
            gradient.lose()
        self.passes.restart(self.passes.reduced)
        self.named = 0
        self.now = Round()

    def give_up(self, why: str) -> None:
        """Ends this rank's part in the job if a round is open: nobody can end it any more."""
        if self.now.open:
            part.check()
            reason = self._unfinished(why)
            part.end(reason)
            raise reason

    def broken_off(self, inside: object) -> None:
        """To be called when an exception has ended a pass: as give_up(), in a moment."""
        now, world = self.now, requests.world()
        if now.inside is not inside:
            return
        now.sending = False
        if now.open:
            part.end_soon(
                self._unfinished("an exception has ended its backward pass"),
                lambda: self.now is now and requests.world() == world,
            )

    def _unfinished(self, why: str) -> FarandoleError:
        return FarandoleError(f"{self.consensus.scope} leaves gradients under way: {why}")

    # ---- between passes

    def reset(self) -> None:
        """For zero_grad(): restarts the counts."""
        self.give_up("zero_grad() was called")
        self.passes.restart(reduced=False)
        for gradient in self.gradients:
            gradient.hook()

    def stepped(self) -> None:
        """To be called after the optimizer's step."""
        self.passes.restart(reduced=False)
        self._steps[requests.joins[self.settings.process_set]] += 1


def _abandon_all() -> None:
    for reducer in list(_all):
        if reducer.now.open:
            reducer.abandon()


requests.on_restart(_abandon_all)  # what was under way has ended with the runtime
