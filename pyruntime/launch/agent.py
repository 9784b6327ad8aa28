# SPDX-License-Identifier: Apache-2.0
"""The agent of one host of an elastic job.

The agent starts and kills the ranks on its host, and passes messages between them and the
supervisor. membership/agent.py makes the agent's decisions. The agent runs on the main thread.
Other threads put events into its queue.

A job has one agent per host. A new agent kills an old agent, whose ranks then end as well.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from farandole.errors import error_text, printable
from farandole.launch.job import is_inherited
from farandole.launch.rank_process import RankProcess, stamp
from farandole.membership.agent import Action, Agent, Kill, Start
from farandole.membership.messages import Assignment, End, WorkerState, decode, encode
from farandole.start import system_calls
from farandole.start.agent_client import AGENT
from farandole.start.connection import Connection, open_connection, process_of
from farandole.start.server import Client, Server

MODULE = "farandole.launch.agent"  # part of every agent's command line
BEAT = 1.0  # seconds between heartbeats
# Environment variable that the supervisor sets. Holds the supervisor's address and key, and the
# ranks' secret.
CONTACT = "FARANDOLE_SUPERVISOR"
PREEMPTED = 75  # exit code of agents and supervisors after a signal
_LEASE = 30.0  # seconds; valid until the supervisor has sent a lease
_LAST_WORDS = 1.0  # seconds to wait for the last message of an ended process

Event = Callable[[], object]


class _RankListener(Server):
    """Listens for this host's ranks, and refuses processes of other users.

    Methods whose names start with an underscore run on the listener's thread.
    """

    def __init__(self, events: SimpleQueue[Event], runner: AgentRunner) -> None:
        self._events, self._runner = events, runner
        self._client: dict[int, Client] = {}
        super().__init__("ranks", b"")

    def tell(self, rank: int, message: bytes) -> None:
        """Sends a message to the process with the number `rank`, if that process is connected.

        May be called from any thread.
        """

        def send() -> None:
            if rank in self._client:
                self._send(self._client[rank], message)

        self.call_soon(send)

    def _connected(self, client: Client) -> None:
        self._client[client.rank] = client

    def _received(self, client: Client, message: bytes) -> None:
        if self._client.get(client.rank) is not client:
            return  # a late message from an earlier program of this process
        fields, pid = json.loads(message), process_of(client.connection)
        self._events.put(lambda: self._runner.hear_rank(client.rank, pid, fields))

    def _disconnected(self, client: Client) -> None:
        if self._client.get(client.rank) is client:  # otherwise the process runs its next program
            del self._client[client.rank]
            self._events.put(lambda: self._runner.rank_hung_up(client.rank))


class AgentRunner:
    """Carries out the agent's decisions. Owns the agent's connections and processes."""

    def __init__(self, contact: str, folder: str, host: str, slots: int) -> None:
        self._address, self._key, self._secret = contact.rsplit(" ", 2)
        self._folder, self._host = folder, host
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._listener = _RankListener(self._events, self)
        name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._slots = slots
        self._agent = Agent(name, host, slots, _LEASE, time.monotonic())
        self._numbers: dict[str, int] = {}  # each process's number, by the process's name
        self._names: list[str] = []  # each process's name, by the process's number
        self._processes: dict[str, RankProcess] = {}
        self._blobs: dict[tuple[str, int, int], str] = {}  # data for unfinished allgathers
        self._connection: Connection | None = None
        self._job: dict[str, Any] = {}  # the supervisor's description of the job
        self._over = False
        self._looked = time.monotonic()

    # ---- the loop

    def run(self) -> int:
        """Runs until the agent ends. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *got: self._events.put(lambda: self._preempt(got[0])))
        threading.Thread(target=self._seek, name="supervisor", daemon=True).start()
        beat = 0.0
        with self._listener:
            while not self._over:
                try:
                    self._events.get(timeout=max(0.0, beat - time.monotonic()))()
                    while not self._events.empty():
                        self._events.get()()
                except queue.Empty:
                    beat = time.monotonic() + BEAT
                    self._look()
                self._report()
                alone = self._agent.lease_expired(time.monotonic()) and self._agent.idle
                if alone:
                    say("the supervisor has not answered in time: this agent ends")
                if alone or self._agent.drained:
                    return PREEMPTED if self._agent.draining else 1
        return 0

    def _report(self) -> None:
        self._tell(["status", encode(self._agent.status(time.monotonic()))])

    def _look(self) -> None:
        now = time.monotonic()
        known = self._agent.orphaned
        self._act(self._agent.tick(now))
        if self._agent.orphaned and not known:
            say(
                f"the supervisor does not answer {self._host}: the ranks leave at their next "
                f"commit; remedy: run the same command with --checkpoint-dir {self._folder}"
            )
        step, self._looked = min(now - self._looked, 2 * BEAT), now
        for process in self._processes.values():
            process.stopped = process.stopped + step if process.is_stopped() else 0.0
            limit = float(self._job.get("stop", 0.0))
            if process.stopped > limit > 0 and process.code is None:
                process.said = End.LOST, f"it was stopped for {limit:g} s (FARANDOLE_STALL_ABORT)"
                say(f"a process on {socket.gethostname()} has been stopped for {limit:g} s: killed")
                process.kill()

    def _preempt(self, number: int) -> None:
        if self._agent.draining:
            return
        grace = float(self._job.get("grace", 0.0))
        self._agent.drain(time.monotonic() + grace)
        name = signal.Signals(number).name
        say(f"{self._host} is being preempted ({name}): its ranks leave within {grace:g} s")
        self._report()  # now, so that leaving ranks do not count as lost
        for process in self._processes.values():
            process.preempt()

    # ---- the supervisor

    def _seek(self) -> None:
        """Connects to the supervisor, and reconnects after each failure. Runs on its own thread."""
        while True:
            try:
                key = bytes.fromhex(self._key)
                # A send must not delay the end of the lease. Messages that fail are sent again.
                with open_connection(self._address, key, send_seconds=2 * BEAT) as line:
                    self._events.put(lambda line=line: self._found(line))  # type: ignore[misc]
                    while True:
                        fields = json.loads(line.receive())
                        self._events.put(lambda fields=fields: self._hear(fields))  # type: ignore[misc]
            except (OSError, EOFError, ValueError):
                pass
            time.sleep(BEAT / 5)

    def _found(self, connection: Connection) -> None:
        self._connection = connection
        for key, data in self._blobs.items():
            self._tell(["blob", *key, data])

    def _tell(self, fields: list[Any]) -> None:
        try:
            if self._connection is not None:
                self._connection.send(json.dumps(fields).encode())
        except OSError:
            self._connection = None

    def _hear(self, fields: list[Any]) -> None:
        what, *rest = fields
        if what == "job":
            self._job = rest[0]
            self._agent.set_lease(float(self._job["lease"]))
            with contextlib.suppress(OSError):  # the folder may not exist on this host
                os.chdir(self._job["folder"])
        elif what == "wanted":
            self._act(self._agent.receive(decode(Assignment, rest[0])))
        elif what == "met":
            world, turn = rest[:2]
            for key in [key for key in self._blobs if key[1:] == (world, turn)]:
                del self._blobs[key]
                self._tell_rank(key[0], fields)
        elif what == "over":
            self._over = True

    # ---- the ranks

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action.name)
            elif isinstance(action, Kill):
                self._processes[action.name].kill()
            else:
                self._tell_rank(action.name, ["view", encode(action.view)])

    def _start(self, name: str) -> None:
        number = self._numbers[name] = len(self._names)
        self._names.append(name)
        slot = next(n for n in range(len(self._names)) if n not in self._taken())
        job = self._job
        ours = {AGENT: f"{self._listener.address} {number} {name}", "LOCAL_RANK": str(slot)}

        def label() -> str:
            members = self._agent.members
            rank = str(members.index(name)) if name in members else "new"
            return stamp(rank, job["timestamp"]) if job["tag"] or job["timestamp"] else ""

        def ended(code: int) -> None:
            self._events.put(lambda: self._ended(name, code))

        try:
            process = RankProcess(job["command"], self._environment() | ours, label, ended)
        except OSError as reason:  # for example, too many processes; a retry may succeed
            self._agent.ended(name, End.LOST, f"can't be started: {error_text(reason)}", 127)
            return
        process.slot = slot
        self._processes[name] = process

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not is_inherited(name)}
        threads = max(1, len(os.sched_getaffinity(0)) // self._slots)  # as mpirun and torchrun do
        ours = {"FARANDOLE_CHECKPOINT_DIR": self._folder}
        return {"OMP_NUM_THREADS": str(threads), **own, **ours}

    def _taken(self) -> set[int]:
        return {process.slot for process in self._processes.values() if process.code is None}

    def hear_rank(self, number: int, pid: int, fields: list[Any]) -> None:
        """Handles a message from a rank. `pid` is the number of the rank's process on this host."""
        name = self._names[number]
        process = self._processes[name]
        what, *rest = fields
        process.connected = True
        process.meet(pid)
        if process.settled:  # the program has outlived the process that started it
            process.kill()
        elif what == "here":
            # A second program of this process must not join the worlds of the first program.
            self._tell_rank(name, ["begin", self._agent.world_of(name), self._secret])
            process.called = True
            process.said = None  # any earlier announcement was that of an earlier program
            self._agent.announce(name, None)
        elif what == "state":
            self._act(self._agent.report(name, decode(WorkerState, rest[0])))
        elif what == "blob":
            world, turn, data = rest
            self._blobs[name, world, turn] = data
            self._tell(["blob", name, world, turn, data])
        elif what == "end":
            process.said = End(rest[0]), str(rest[1])
            self._agent.announce(name, process.said[0])

    def rank_hung_up(self, number: int) -> None:
        """Handles the end of a rank's connection, which means that its program has ended."""
        name = self._names[number]
        self._processes[name].connected = False
        self._processes[name].meet(0)
        for key in [key for key in self._blobs if key[0] == name]:
            del self._blobs[key]
        self._settle(name)

    def _tell_rank(self, name: str, fields: list[Any]) -> None:
        self._listener.tell(self._numbers[name], json.dumps(fields).encode())

    def _ended(self, name: str, code: int) -> None:
        process = self._processes[name]
        process.code = code
        process.kill()  # kills the process's children as well

        def give_up() -> None:
            process.connected = False
            self._settle(name)

        if process.connected:  # the process's last message may be on the way
            timer = threading.Timer(_LAST_WORDS, lambda: self._events.put(give_up))
            timer.daemon = True
            timer.start()
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Reports how a process has ended, once its exit code and its last message are known."""
        process = self._processes[name]
        if process.code is not None and not process.connected and not process.settled:
            process.settled = True
            end, text = process.end()
            self._agent.ended(name, end, text, process.code)


def say(text: str) -> None:
    """Prints a line to standard error and never blocks, because another thread writes the line.

    Therefore the job survives a closed pipe, and does not wait for a pager that is stopped.
    """
    _writer()
    _said.put(f"farandole: {printable(text, lines=True)}\n".encode(errors="backslashreplace"))


_said: SimpleQueue[bytes | threading.Event] = SimpleQueue()


@functools.cache
def _writer() -> None:
    def write() -> None:
        while True:
            line = _said.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with contextlib.suppress(OSError):  # a full disk, or a closed pipe
                os.write(2, line)

    def flush() -> None:
        written = threading.Event()
        _said.put(written)
        written.wait(_LAST_WORDS)

    threading.Thread(target=write, name="messages", daemon=True).start()
    atexit.register(flush)


def kill_predecessor(folder: str, host: str) -> None:
    """Kills an earlier agent of this job on this host, if there is one.

    The earlier agent may be stopped, its ssh may have ended, or its supervisor may have been
    killed.
    """
    place = os.path.realpath(folder)
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            one = system_calls.pidfd_open(int(process.name))
            try:
                words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
                # programs.own() puts the words in this order. In srun's command line, these words
                # are at other positions.
                if (
                    words[1:2] == ["-c"]
                    and words[3:4] == [MODULE]
                    and os.path.realpath(words[4]) == place
                    and (not host or host in words[5:])
                ):
                    system_calls.pidfd_send_signal(one, signal.SIGKILL)
                    select.select([one], [], [], _LAST_WORDS)
            finally:
                os.close(one)


def main() -> int:
    """Runs the agent. Returns the exit code."""
    parser = argparse.ArgumentParser("farandole.launch.agent")
    parser.add_argument("folder", help="for the job's commits")
    parser.add_argument("--slots", type=int, default=1, help="ranks that this host takes")
    text = "read the ranks' environment from standard input, as JSON; used over ssh"
    parser.add_argument("--environment", action="store_true", help=text)
    parser.add_argument("--host", default="", help="name to report; default: this host's")
    options = parser.parse_args()
    if options.environment:
        os.environ.update(json.load(sys.stdin))
    kill_predecessor(options.folder, options.host)
    host = options.host or socket.gethostname()
    return AgentRunner(os.environ.pop(CONTACT), options.folder, host, options.slots).run()


if __name__ == "__main__":
    sys.exit(main())
