# SPDX-License-Identifier: Apache-2.0
"""The supervisor of `farandole run --elastic`.

The supervisor starts an agent on each host, passes the agents' reports to membership/scheduler.py,
and sends the scheduler's decisions to the agents. It runs on the main thread. Other threads put
events into its queue.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from farandole.commits import FILE
from farandole.errors import CheckpointError, counted
from farandole.launch.agent import BEAT, PREEMPTED, say
from farandole.launch.agent_processes import AgentProcesses
from farandole.launch.allgathers import Allgathers
from farandole.launch.disk import JobFolder
from farandole.launch.host_list import HostList
from farandole.launch.job import Job
from farandole.membership.messages import AgentStatus, decode, encode
from farandole.membership.scheduler import Policy, Scheduler
from farandole.start.server import Client, Server
from farandole.start.session import SECRET_BYTES
from farandole.trust import Folder

_ENDS = (signal.SIGINT, signal.SIGQUIT)  # kill all ranks, while other signals ask ranks to leave
_SIGNALS = (*_ENDS, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

Event = Callable[[], object]


@dataclass(frozen=True)
class ElasticOptions:
    """Options of an elastic job."""

    policy: Policy
    script: str  # discovery script, which prints the hosts; "" if there is none
    slots: int  # number of slots of a host that the script prints without a number
    grace: float  # seconds that ranks have to leave after a signal
    # Folder for commits. None means a new folder, which is removed after success.
    folder: Path | None


class _AgentListener(Server):
    """Listens for agents.

    Methods whose names start with an underscore run on the listener's thread.
    """

    def __init__(self, here: bool, supervisor: _Supervisor) -> None:
        self._supervisor = supervisor
        super().__init__("listener", here=here)

    def tell(self, client: Client, fields: list[Any]) -> None:
        """Sends a message to an agent. May be called from any thread."""
        self.call_soon(lambda: self._send(client, json.dumps(fields).encode()))

    def _connected(self, client: Client) -> None:
        self._supervisor.events.put(lambda: self._supervisor.welcome(client))

    def _received(self, client: Client, message: bytes) -> None:
        what, *rest = _parse(message)
        if what == "status":
            (text,) = rest
            status = decode(AgentStatus, text)
            self._supervisor.events.put(lambda: self._supervisor.hear(client, status))
        else:
            name, world, turn, data = rest
            whose = str(name), int(world), int(turn), str(data)
            self._supervisor.events.put(lambda: self._supervisor.meet(client, *whose))

    def _disconnected(self, client: Client) -> None:
        self._supervisor.events.put(lambda: self._supervisor.lose(client))


def supervise(job: Job, options: ElasticOptions) -> int:
    """Runs the job to its end. Returns the exit code.

    May be called on the main thread only, because of signals.
    """
    own = Folder(options.folder.absolute()) if options.folder else _new_folder(job.here)
    folder = own.path
    try:
        supervisor = _Supervisor(job, options, own)
        with _signals(supervisor), supervisor.listener:
            code = supervisor.run()
    except BaseException:
        if options.folder is None and not _has_commit(folder):
            with contextlib.suppress(OSError):
                own.remove()
        raise
    kept = _has_commit(folder)
    if options.folder is None and (code == 0 or not kept):
        with contextlib.suppress(OSError):
            own.remove()
    elif code != 0 and kept:
        say(f"the commits are in {folder}: continue with --checkpoint-dir {folder}")
    return code


def _new_folder(here: bool) -> Folder:
    """Creates a folder for commits in the working folder, which other hosts may share.

    If other users could replace the new folder there, and all ranks run `here`, creates it in the
    system's temporary folder instead. Raises CheckpointError and OSError.
    """
    places = [Path.cwd(), Path(tempfile.gettempdir())]
    for place in places if here else places[:1]:
        folder = Folder(Path(tempfile.mkdtemp(prefix="elastic-", dir=place)), new=True)
        try:
            with folder.opened():
                return folder
        except CheckpointError as reason:
            with contextlib.suppress(OSError):
                folder.path.rmdir()
            refused = reason
    raise refused


def _has_commit(folder: Path) -> bool:
    """Returns True if the folder has a commit from which the next start can continue."""
    with contextlib.suppress(OSError):
        return any(folder.glob(f"call-*/{FILE}"))
    return False


class _Supervisor:
    """Connects the scheduler to agents, signals and the disk."""

    def __init__(self, job: Job, options: ElasticOptions, folder: Folder) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        here = job.here and not options.script
        host = socket.gethostname() if here else ""
        disk = JobFolder(folder, host, say, lambda: self.events.put(lambda: None))
        self._begin = time.monotonic()  # no agent is started before this time
        if disk.orphans:  # ranks of a killed supervisor may train and write commits until then
            self._begin += options.policy.gone
            say(
                f"an earlier command was killed: this one starts in {options.policy.gone:g} s, "
                "once the earlier ranks have ended"
            )
        self._disk = disk
        self.listener = _AgentListener(here, self)
        self._job, self._options, self._folder = job, options, folder.path
        self._cwd = str(Path.cwd())  # read now, because the folder may be removed later
        self._scheduler = Scheduler(options.policy, disk.newest_commit, time.monotonic())
        self._allgathers: Allgathers[Client] = Allgathers()
        self._clients: dict[str, Client] = {}  # each agent's connection, by the agent's name
        self._sent: dict[str, Any] = {}  # the last message to each agent, by the agent's name
        self._stopped = 0  # the signal that ends the job
        self._deadline = float("inf")  # ranks that have not left by this time are killed

    def run(self) -> int:
        """Runs the job. Returns the exit code."""
        options, hosts = self._options, self._job.hosts
        contact = f"{self.listener.address} {self.listener.key} {secrets.token_hex(SECRET_BYTES)}"
        with (
            HostList(hosts, options.script, options.slots, say) as host_list,
            AgentProcesses(self._job, self._folder, contact, options.policy.deaf) as agents,
        ):
            beat = 0.0
            while self._scheduler.outcome is None:
                with contextlib.suppress(queue.Empty):
                    self.events.get(timeout=max(0.0, beat - time.monotonic()))()
                    while not self.events.empty():
                        self.events.get()()
                due = time.monotonic() >= beat
                if due:
                    beat = time.monotonic() + BEAT
                    self._look(host_list, agents)
                self._step(due)
            for client in self._clients.values():
                self.listener.tell(client, ["over"])
            agents.wait()
        self._disk.close()
        return self._code(self._scheduler.outcome)

    def _look(self, host_list: HostList, agents: AgentProcesses) -> None:
        if host_list.scripted or host_list.hosts:
            self._scheduler.workers.set_slots({host.name: host.slots for host in host_list.hosts})
        if time.monotonic() >= self._begin:
            agents.tend(host_list.hosts, host_list.scripted, self._scheduler.workers)
        self._give_up(host_list, agents.failing())
        if time.monotonic() > self._deadline:
            self._scheduler.ending.fail("ranks have not left in time: they are killed")

    def _give_up(self, host_list: HostList, failing: dict[str, str]) -> None:
        """Ends a job that has had no world and needs hosts whose agents fail at each start."""
        slots = sum(host.slots for host in host_list.hosts if host.name not in failing)
        needed = slots < self._options.policy.least and not host_list.scripted
        if failing and needed and not self._scheduler.worlds:
            self._scheduler.ending.fail("; ".join(failing.values()))

    def _step(self, due: bool) -> None:
        try:
            assignments = self._scheduler.step(time.monotonic())
        except CheckpointError as reason:  # the commit on the disk cannot be used
            self._scheduler.ending.fail(str(reason))
            return
        for agent, wanted in assignments.items():
            new = wanted.workers, wanted.view
            if (due or self._sent.get(agent) != new) and agent in self._clients:
                self._sent[agent] = new
                self.listener.tell(self._clients[agent], ["wanted", encode(wanted)])
            self._allgathers.begin(wanted.view.world)
        for line in self._scheduler.log:
            say(line)
        self._scheduler.log.clear()

    def _code(self, outcome: str) -> int:
        if self._stopped in _ENDS:
            return 128 + self._stopped
        if self._stopped or (self._scheduler.ending.leaves and not outcome):
            where = "and their state" if _has_commit(self._folder) else "but no state"
            say(outcome or f"all ranks have left, {where} is on the disk")
            return PREEMPTED
        if outcome:
            say(outcome)
            code = self._scheduler.ending.code
            return code if 0 < code < 128 else 1
        worlds = self._scheduler.worlds
        say(f"the job has finished in {counted(worlds, 'world')}" if worlds else "nothing was done")
        return 0

    # ---- agents

    def welcome(self, client: Client) -> None:
        """Describes the job to a new agent.

        Strangers may read this message on the network, so it holds no secret. Agents get the ranks'
        environment when they are started.
        """
        job, options = self._job, self._options
        description = {
            "command": list(job.command),
            "folder": self._cwd,
            "lease": options.policy.lease,
            "stop": options.policy.late,
            "grace": options.grace,
            "tag": job.tag,
            "timestamp": job.timestamp,
        }
        self.listener.tell(client, ["job", description])

    def hear(self, client: Client, status: AgentStatus) -> None:
        """Applies an agent's report."""
        self._clients[status.agent] = client
        self._scheduler.receive(status, time.monotonic())

    def meet(self, client: Client, name: str, world: int, turn: int, data: str) -> None:
        """Handles a rank's data for an allgather, which the rank's agent has sent."""
        self._allgathers.put(client, name, world, turn, data)
        for other, answer in self._allgathers.answers():
            self.listener.tell(other, answer)

    def lose(self, client: Client) -> None:
        """Notes that the connection to an agent has ended."""
        for name in [name for name, other in self._clients.items() if other is client]:
            del self._clients[name]
            self._sent.pop(name, None)
            self._scheduler.workers.disconnect(name)

    # ---- signals

    def stop(self, number: int) -> None:
        """Handles a signal.

        The first SIGINT or SIGQUIT, or the second signal of any kind, kills all ranks. Any other
        signal asks the ranks to leave.
        """
        name = signal.Signals(number).name
        if self._stopped or number in _ENDS:
            say(f"{name}: all ranks are killed")
            self._scheduler.ending.fail(name)
        else:
            grace = self._options.grace
            say(f"{name}: all ranks leave at their next commit, within {grace:g} s")
            self._deadline = time.monotonic() + grace
            self._scheduler.ending.leave()
        self._stopped = number


def _parse(message: bytes) -> list[Any]:
    """Parses an agent's message.

    Raises ValueError unless the message is a list that starts with a known word.
    """
    fields = json.loads(message)
    if not isinstance(fields, list) or not fields or fields[0] not in ("status", "blob"):
        raise ValueError("it is not a message of an agent")
    return fields


@contextlib.contextmanager
def _signals(supervisor: _Supervisor) -> Iterator[None]:
    """Context manager that puts the process's signals into the queue of events."""

    def handler(number: int, _: object) -> None:
        supervisor.events.put(lambda: supervisor.stop(number))

    before = {
        number: signal.signal(number, handler)
        for number in _SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # set by nohup
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
