# SPDX-License-Identifier: Apache-2.0
"""A rank under `farandole run --elastic`: what it tells the agent of its host, how it meets the
others of its next world, and whether it shall leave. For init(), elastic training and the end of
the process; membership/member.py decides.

A thread `farandole.agent` hears the agent. Without an agent only signals ask a rank to leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

from farandole.config import setting
from farandole.errors import LibraryError, PeerError, StallError, counted
from farandole.membership.member import Member
from farandole.membership.messages import JOINS, End, View, World, decode, encode
from farandole.start import ancestry
from farandole.start.bootstrap import Bootstrap, Goodbye, Goodbyes
from farandole.start.connection import open_connection
from farandole.start.launchers import launched_rank
from farandole.start.sockets import shared_host

AGENT = "FARANDOLE_AGENT"  # set by the agent: its socket, this process's number and name there
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # that announce a preemption
_SLICE = 0.2  # seconds; between two of them Ctrl-C works
_CONNECT = 30.0  # seconds for the agent to take the call
_STATE_PERIOD = 1.0  # seconds between two words about commits


class AgentClient:
    """The connection to the agent. All methods but those for its thread are called by the thread
    that trains."""

    def __init__(self, address: str, number: str, name: str) -> None:
        """Raises OSError if nobody is there."""
        self._changed = threading.Condition()
        self._answers: dict[tuple[int, int], dict[str, str]] = {}
        self._sent_at = 0.0  # when this rank's commit was told last
        self.left = False  # it ends because it was asked to
        self.lost = False  # the supervisor does not answer a rank's agent
        self.connection = open_connection(address, b"", int(number), _CONNECT)
        self._send("here", os.getpid())
        what, before = "", 0
        while what != "begin":  # what comes before is told again
            what, before, *rest = json.loads(self.connection.receive(_CONNECT))
        self.secret = bytes.fromhex(rest[0])
        self._member = Member(name, int(before))
        # A world trains already, and will take this process in.
        self.alone = name.endswith(JOINS) and not before
        threading.Thread(target=self._listen, name="farandole.agent", daemon=True).start()

    def _send(self, *words: Any) -> None:
        self.connection.send(json.dumps(words).encode())

    def _send_state(self) -> None:
        self._send("state", encode(self._member.state))

    def _listen(self) -> None:
        owner = os.getpid()
        try:
            while True:
                what, *rest = json.loads(self.connection.receive())
                with self._changed:
                    if what == "view":
                        before = self._member.state
                        self._member.receive(decode(View, rest[0]))
                        self.lost |= self._member.lost
                        if self._member.state != before:
                            self._send_state()
                    elif what == "met":
                        self._answers[rest[0], rest[1]] = rest[2]
                    self._changed.notify_all()
        except (OSError, EOFError):
            if os.getpid() == owner and not _ending:
                # Whoever takes this host for lost may start its ranks elsewhere.
                os.write(2, b"farandole: the agent of this host is gone: this rank ends\n")
                os.kill(owner, signal.SIGKILL)

    def _wait(self, done: Callable[[], bool], until: float = float("inf")) -> None:
        """Returns when `done()`, or at that time. Holds the lock that `done` needs."""
        while not done() and time.monotonic() < until:
            self._changed.wait(_SLICE)

    # ---- worlds

    def leave(self, finished: bool = False, met: bool = False, stalled: bool = False) -> None:
        """Notes why this rank leaves its world; see Member.wait()."""
        with self._changed:
            self._member.wait(finished, met, stalled)
            self._send_state()

    def ended(self) -> bool:
        """Waits until the call that this rank has finished has ended on all ranks: True; or until
        there is a world in which it goes on: False."""

        def decided() -> bool:
            return self._member.stay() or self._member.is_awaited()

        with self._changed:
            self._wait(decided)
            if not self._member.state.away:
                self._send_state()
            return not self._member.state.away

    def meet(self) -> ElasticBootstrap:
        """Waits for this rank's next world, and is in it then."""
        with self._changed:
            if not self._member.state.away:
                self._member.wait(met=True)
                self._send_state()
            world: list[World] = []

            def decided() -> bool:
                if not self._member.ends and (found := self._member.enter()) is not None:
                    world.append(found)
                return bool(world) or self._member.ends

            self._wait(decided)
            if not world:
                self.end()
            self._answers.clear()
            self._send_state()
        rank = world[0].members.index(self._member.name)
        return ElasticBootstrap(self, world[0], rank)

    def exchange(self, world: World, turn: int, data: bytes, seconds: float) -> list[bytes]:
        """The data of all members; collective. Raises PeerError and StallError."""
        key = world.number, turn
        with self._changed:
            self._send("blob", *key, data.hex())
            until = time.monotonic() + seconds
            self._wait(lambda: key in self._answers or self._member.broken, until)
            found = self._answers.pop(key, None)
        if found is not None:
            return [bytes.fromhex(found[name]) for name in world.members]
        if self._member.broken:
            raise PeerError(
                f"init(): a rank of world {world.number} was lost while the ranks met; elastic "
                "training goes on in the next one"
            )
        raise StallError(
            f"init(): not all of {counted(len(world.members), 'rank')} came within {seconds:g} s "
            "(FARANDOLE_INIT_TIMEOUT)"
        )

    # ---- commits

    def synchronized(self) -> None:
        """This rank has the state from which the world started."""
        with self._changed:
            self._member.synchronized()
            self._send_state()

    def committed(self) -> None:
        """It has saved the next commit."""
        with self._changed:
            self._member.committed()
            if (now := time.monotonic()) > self._sent_at + _STATE_PERIOD:
                self._sent_at = now
                self._send_state()

    def forget(self) -> None:
        """It has no whole state any more."""
        with self._changed:
            self._member.forget()

    @property
    def meets(self) -> bool:
        """Whether all shall meet after the next commit, because others join or hosts go."""
        return self._member.meets

    @property
    def leaves(self) -> bool:
        """Whether the whole job shall leave."""
        return self._member.leaves

    def end(self) -> NoReturn:
        """Ends this rank's part in the job, as it was asked to. Raises SystemExit, or LibraryError
        where the whole job ends because its supervisor has."""
        if self.lost:
            raise LibraryError(
                "the supervisor of this elastic job does not answer; remedy: give the same command "
                "again, with the same --checkpoint-dir: it continues from the commit on the disk"
            ) from None
        self.left = True
        raise SystemExit(0) from None

    def send_end(self, end: End, text: str = "") -> None:
        """Tells how this process ends."""
        with contextlib.suppress(OSError):
            self._send("end", end.value, text)


class ElasticBootstrap(Bootstrap):
    """The ranks of one world of an elastic job, through their agents and the supervisor."""

    def __init__(self, client: AgentClient, world: World, rank: int) -> None:
        self.world, self.number = world, world.number
        self.rank, self.size = rank, len(world.members)
        self.seconds = float(setting("FARANDOLE_INIT_TIMEOUT"))
        self._client, self._turn = client, 0
        self._introduce(shared_host(), client.secret)

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """The data of every rank, in rank order. Raises StallError and PeerError."""
        self._turn += 1
        limit = self.seconds if seconds is None else seconds
        return self._client.exchange(self.world, self._turn, data, limit)

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Nothing: the agent knows who lives."""
        return Goodbyes(goodbye, lambda: None)

    def abandon(self, reason: BaseException) -> None:
        """Leaves in the middle of init(): the others' init() fails too."""
        with contextlib.suppress(OSError):
            self._client.leave()


_client: AgentClient | None = None
_ending = False  # whether this process is on its way out


def connect() -> AgentClient | None:
    """The client of this process; None: it has none. Raises LibraryError."""
    global _client
    if _client is None and AGENT in os.environ and not ancestry.is_of_rank():
        try:
            _client = AgentClient(*os.environ[AGENT].split(" "))
        except (OSError, EOFError) as reason:
            raise LibraryError(
                f"init(): the agent of this host, which has started this rank, does not answer: "
                f"{reason}"
            ) from reason
    return _client


def retries_init(reason: Exception) -> bool:
    """Whether this rank, whose init() has failed for a reason that another attempt may not have,
    shall meet the others in the next world. It has left the present one then."""
    if _client is None or _client.alone or _client.lost:
        return False
    os.write(2, f"farandole: {reason}; this rank meets the others again\n".encode())
    _client.leave(stalled=isinstance(reason, StallError))
    return True


def may_grow() -> bool:
    """Whether this process, where it is alone now, may train with others later."""
    return _client is not None


def report_failure(cause: str, retried: bool) -> None:
    """Tells that this rank fails; `retried`: another attempt may succeed."""
    if _client is not None:
        _client.send_end(End.LOST if retried else End.FAILED, cause)


def report_end() -> None:
    """Tells that this rank's process ends well."""
    global _ending
    _ending = True
    if _client is not None:
        _client.send_end(End.LEFT if _client.left else End.WELL)


def leave_job() -> NoReturn:
    """Ends this process because a rank was asked to leave; see AgentClient.end()."""
    if _client is not None:
        _client.end()
    raise SystemExit(0)


# ---- signals

_signalled = False


def was_signalled() -> bool:
    """Whether a signal asks this rank to leave."""
    return _signalled


@contextlib.contextmanager
def leaving_on_signals(grace: float | None) -> Iterator[None]:
    """A context in which signals of a preemption ask this rank to leave, instead of ending it.

    The process ends `grace` seconds after the first, if it has not by then; None: signals act as
    usual. If the program has its own handlers, these stay. Threads other than the main one can't
    have any.
    """
    if grace is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    owner = os.getpid()

    def handler(number: int, frame: FrameType | None) -> None:
        global _signalled
        if os.getpid() != owner:  # a child that has hardly begun: see _after_fork
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _signalled:
            return
        _signalled = True
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # The kernel ends it, whatever it does; 0 would mean never.
            signal.setitimer(signal.ITIMER_REAL, max(grace, 0.001))
        name = signal.Signals(number).name
        when = f"at the next commit, within {grace:g} s"
        # Not by print(), in the middle of which the signal may have come.
        who = f"rank {launched_rank()}" if _client is None else f"a rank (process {owner})"
        os.write(2, f"farandole: {who} got {name}: it leaves {when}\n".encode())

    ours = [n for n in _SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
        _handled.add(number)
    try:
        yield
    finally:
        if not _signalled:  # else a second signal must not end it before it has left
            _undo_handlers(ours)


_handled: set[int] = set()


def _undo_handlers(numbers: Iterable[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
        _handled.discard(number)


def _after_fork() -> None:
    """Lets signals end a child, such as a worker of a DataLoader, as usual."""
    global _client
    _client = None
    _undo_handlers(list(_handled))


os.register_at_fork(after_in_child=_after_fork)
