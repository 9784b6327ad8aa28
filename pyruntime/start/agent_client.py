# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the agent of its host, under `farandole run --elastic`.

The client reports the rank's state, meets the other ranks of the next world, and learns whether the
rank must leave. It is used by init(), by elastic training and at the end of the process.
membership/member.py makes the decisions. A thread `farandole.agent` receives the agent's messages.
Without an agent, only signals make a rank leave.
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

# Environment variable that the agent sets. Holds the agent's socket, and this process's number and
# name.
AGENT = "FARANDOLE_AGENT"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # these signals announce a preemption
_SLICE = 0.2  # length in seconds of an uninterruptible wait, after which Ctrl-C is handled
_CONNECT = 30.0  # seconds within which the agent must answer
_STATE_PERIOD = 1.0  # seconds between two reports of commits


class AgentClient:
    """The connection to the agent. Used on the training thread, except for _listen()."""

    def __init__(self, address: str, number: str, name: str) -> None:
        """Raises OSError if no agent answers."""
        self._changed = threading.Condition()
        self._answers: dict[tuple[int, int], dict[str, str]] = {}
        self._sent_at = 0.0  # time of the last report of a commit
        self.left = False  # True if this rank ends because it was asked to
        self.lost = False  # True if the supervisor does not answer this rank's agent
        self.leaves_lost = False  # True if all ranks leave because some agent gets no answer
        self._given_up = False  # True if init() has failed here, and may connect again
        self.connection = open_connection(address, b"", int(number), _CONNECT)
        try:
            self._send("here")
            what, before = "", 0
            while what != "begin":  # drops earlier messages, because the agent will repeat them
                what, before, *rest = json.loads(self.connection.receive(_CONNECT))
            self.secret = bytes.fromhex(rest[0])
            self._member = Member(name, int(before))
            # True if this process was started to join a running world.
            self.alone = name.endswith(JOINS) and not before
            threading.Thread(target=self._listen, name="farandole.agent", daemon=True).start()
        except BaseException:
            self._given_up = True
            self.connection.close()
            raise

    def _send(self, *fields: Any) -> None:
        self.connection.send(json.dumps(fields).encode())

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
                        self.lost = self._member.lost  # False once the supervisor answers again
                        if self._member.state != before:
                            self._send_state()
                    elif what == "met":
                        self._answers[rest[0], rest[1]] = rest[2]
                    self._changed.notify_all()
        except (OSError, EOFError):
            if os.getpid() == owner and not (_ending or self._given_up):
                # The supervisor may already have started other ranks in place of this host's.
                os.write(2, b"farandole: the agent of this host is gone: this rank ends\n")
                os.kill(owner, signal.SIGKILL)

    def _wait(self, done: Callable[[], bool], until: float = float("inf")) -> None:
        """Waits until `done()` is true or the time is `until`. The caller must hold the lock."""
        while not done() and time.monotonic() < until:
            self._changed.wait(_SLICE)

    # ---- worlds

    def leave(self, finished: bool = False, met: bool = False, stalled: bool = False) -> None:
        """Reports that this rank leaves its world, and why. Takes Member.wait()'s arguments."""
        with self._changed:
            self._member.wait(finished, met, stalled)
            self._send_state()

    def ended(self) -> bool:
        """Waits after a call of train() has ended on this rank.

        Returns True once the call has ended on all ranks, or False if this rank must continue in a
        new world.
        """

        def decided() -> bool:
            return self._member.stay() or self._member.is_awaited()

        with self._changed:
            self._wait(decided)
            if not self._member.state.away:
                self._send_state()
            return not self._member.state.away

    def meet(self) -> ElasticBootstrap:
        """Waits for this rank's next world and enters it.

        If the job ends first, raises the same error as end().
        """
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
        """Gathers the data of all members of a world, and returns it in rank order.

        This is a collective. Raises PeerError and StallError.
        """
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
                "training continues in the next world"
            )
        raise StallError(
            f"init(): not all of {counted(len(world.members), 'rank')} came within {seconds:g} s "
            "(FARANDOLE_INIT_TIMEOUT)"
        )

    # ---- commits

    def synchronized(self) -> None:
        """Reports that this rank has received the commit from which the world starts."""
        with self._changed:
            self._member.synchronized()
            self._send_state()

    def committed(self) -> None:
        """Reports that this rank has made the next commit."""
        with self._changed:
            self._member.committed()
            if (now := time.monotonic()) > self._sent_at + _STATE_PERIOD:
                self._sent_at = now
                self._send_state()

    def forget(self) -> None:
        """Notes that this rank has no complete commit in memory."""
        with self._changed:
            self._member.forget()

    @property
    def meets(self) -> bool:
        """True if all ranks must meet after the next commit, because ranks join or hosts leave."""
        return self._member.meets

    @property
    def leaves(self) -> bool:
        """True if all ranks must leave after the next commit."""
        return self._member.leaves

    def end(self) -> NoReturn:
        """Ends this rank, which was asked to leave.

        Raises SystemExit, or LibraryError if the reason is that the supervisor does not answer.
        """
        # Ranks that leave together have agreed on the reason. A rank that waits decides alone.
        if self.leaves_lost or (self.lost and self._member.state.away):
            raise LibraryError(
                "the supervisor of this elastic job does not answer; remedy: run the same command "
                "again, with the same --checkpoint-dir: it continues from the commit on the disk"
            ) from None
        self.left = True
        raise SystemExit(0) from None

    def send_end(self, end: End, text: str = "") -> None:
        """Reports how this process ends."""
        with contextlib.suppress(OSError):
            self._send("end", end.value, text)


class ElasticBootstrap(Bootstrap):
    """Bootstrap for one world of an elastic job. Data goes through agents and the supervisor."""

    def __init__(self, client: AgentClient, world: World, rank: int) -> None:
        self.world, self.number = world, world.number
        self.rank, self.size = rank, len(world.members)
        self.seconds = float(setting("FARANDOLE_INIT_TIMEOUT"))
        self._client, self._turn = client, 0
        self._introduce(shared_host(), client.secret)

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """Returns the data of every rank, in rank order. This is a collective.

        Raises StallError and PeerError.
        """
        self._turn += 1
        limit = self.seconds if seconds is None else seconds
        return self._client.exchange(self.world, self._turn, data, limit)

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Does nothing, because the agent tracks which ranks are alive."""
        return Goodbyes(goodbye, lambda: None)

    def abandon(self, reason: BaseException) -> None:
        """Reports that this rank's init() has failed, so that it also fails on all other ranks."""
        with contextlib.suppress(OSError):
            self._client.leave()


_client: AgentClient | None = None
_ending = False  # True if this process is about to end


def connect() -> AgentClient | None:
    """Returns this process's client, or None if there is no agent. Raises LibraryError."""
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
    """Returns True if init() must be repeated in the next world, which may avoid this error.

    The rank has then left the present world.
    """
    if _client is None or _client.alone or _client.lost or _client.leaves_lost:
        return False
    os.write(2, f"farandole: {reason}; this rank meets the others again\n".encode())
    _client.leave(stalled=isinstance(reason, StallError))
    return True


def may_grow() -> bool:
    """Returns True if other ranks may join this process later, even if it is alone now."""
    return _client is not None


def report_failure(cause: str, retried: bool) -> None:
    """Reports that this rank has failed. `retried` is True if a retry may succeed."""
    if _client is not None:
        _client.send_end(End.LOST if retried else End.FAILED, cause)


def report_end() -> None:
    """Reports that this process ends without an error."""
    global _ending
    _ending = True
    if _client is not None:
        _client.send_end(End.LEFT if _client.left else End.WELL)


def leave_job() -> NoReturn:
    """Ends this process because ranks were asked to leave. Raises AgentClient.end()'s errors."""
    if _client is not None:
        _client.end()
    raise SystemExit(0)


# ---- signals

_signalled = False


def was_signalled() -> bool:
    """Returns True if a signal has asked this rank to leave."""
    return _signalled


@contextlib.contextmanager
def leaving_on_signals(grace: float | None) -> Iterator[None]:
    """Context manager during which SIGTERM and SIGUSR1 ask this rank to leave instead of ending it.

    The kernel ends the process `grace` seconds after the first signal. Nothing changes if `grace`
    is None, in threads other than the main thread, or for signals that the program handles itself.
    """
    if grace is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    owner = os.getpid()

    def handler(number: int, frame: FrameType | None) -> None:
        global _signalled
        if os.getpid() != owner:  # a forked child, before _after_fork()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _signalled:
            return
        _signalled = True
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # The kernel then ends the process, even if it hangs. 0 would disable the timer.
            signal.setitimer(signal.ITIMER_REAL, max(grace, 0.001))
        name = signal.Signals(number).name
        when = f"at the next commit, within {grace:g} s"
        # Uses os.write(), because the signal may have interrupted print().
        who = f"rank {launched_rank()}" if _client is None else f"a rank (process {owner})"
        os.write(2, f"farandole: {who} got {name}: it leaves {when}\n".encode())

    ours = [n for n in _SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in ours:
            _handled.add(number)
            signal.signal(number, handler)
        yield
    finally:
        if not _signalled:  # otherwise a second signal could end the process too early
            _undo_handlers(ours)


_handled: set[int] = set()


def _undo_handlers(numbers: Iterable[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
        _handled.discard(number)


def _after_fork() -> None:
    """Restores the default signals in a forked child, such as a DataLoader's worker."""
    global _client
    _client = None
    _undo_handlers(list(_handled))


os.register_at_fork(after_in_child=_after_fork)
