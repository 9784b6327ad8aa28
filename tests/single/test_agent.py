# SPDX-License-Identifier: Apache-2.0
"""An agent and its ranks' processes in wrappers and containers; a supervisor or ssh that does not
read."""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from farandole.launch import agent
from farandole.launch.agent_processes import AgentProcesses
from farandole.launch.job import Host, Job
from farandole.start.server import Server
from farandole.start.siblings import stat
from harness.process import PATIENCE

PROGRAM = """
import os, signal, sys
from farandole.start.connection import open_connection
open("pipe").close()  # waits for the test
address, number, _ = os.environ["FARANDOLE_AGENT"].split(" ")
with open_connection(address, b"", int(number)) as line:
    line.send(b'["here", %d]' % os.getpid())
    signal.pause()
"""
OWN_GROUP = 'set -m; "$0" -c "$1" & echo $! > pid; '
CONTAINER = 'unshare -pf --kill-child "$0" -c "$1"'
CAN_MAKE_ONE = subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode == 0
needs_one = pytest.mark.skipif(not CAN_MAKE_ONE, reason="this user can't make a PID namespace")


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """An agent without a supervisor."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    found = agent.AgentRunner("/nowhere 00 00", str(tmp_path), "here", 1)
    found._agent = Mock(**{"world_of.return_value": 0, "members": []})
    with found._listener:
        yield found
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)


def start(runner, wrapper):
    """Its process, which runs PROGRAM in a shell script."""
    command = ["bash", "-c", wrapper, sys.executable, PROGRAM]
    runner._job = {"command": command, "tag": False, "timestamp": False}
    runner._start("one")
    return runner._processes["one"]


def until(runner, done):
    while not done():
        runner._events.get(timeout=PATIENCE)()


@pytest.mark.parametrize("wrapper", [OWN_GROUP + "wait", pytest.param(CONTAINER, marks=needs_one)])
def test_the_program_is_killed_too(runner, wrapper):
    process = start(runner, wrapper)
    Path("pipe").write_text("")
    until(runner, lambda: process.connected)
    assert PROGRAM in Path(f"/proc/{process.pid}/cmdline").read_text()
    program = os.pidfd_open(process.pid)
    process.kill()
    assert select.select([program], [], [], PATIENCE)[0]


def test_a_program_that_connects_after_its_wrappers_end_is_killed(runner):
    process = start(runner, OWN_GROUP)
    until(runner, lambda: process.settled)
    program = os.pidfd_open(int(Path("pid").read_text()))
    Path("pipe").write_text("")
    until(runner, lambda: process.connected)
    assert select.select([program], [], [], PATIENCE)[0]
    assert not runner._agent.announce.called


def test_a_process_that_has_the_programs_number_by_now_is_not_killed(runner):
    process = start(runner, "true")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        process.meet(other.pid)
        process._begun = process._begun._replace(start="0")
        process.kill()
    assert other.returncode == 0


def test_a_name_that_is_cut_within_a_character():
    name = Path("/proc/self/comm")
    before = name.read_bytes().rstrip(b"\n")
    name.write_bytes("обучение".encode())
    try:
        assert stat(os.getpid()) is not None
    finally:
        name.write_bytes(before)


def test_a_supervisor_that_does_not_read_delays_no_lease(runner, monkeypatch):
    monkeypatch.setattr(agent, "BEAT", 0.1)
    held = queue.SimpleQueue()
    with Server("stopped") as supervisor:
        monkeypatch.setattr(supervisor, "_received", lambda *_: held.get())
        runner._address, runner._key = supervisor.address, supervisor.key
        threading.Thread(target=runner._seek, daemon=True).start()
        until(runner, lambda: runner._connection is not None)
        runner._tell(["stops the supervisor"])
        begun = time.monotonic()
        runner._tell(["x" * (1 << 24)])
        took = time.monotonic() - begun
        held.put(None)
    assert runner._connection is None
    assert took < 20, "30 s is the default limit"


def test_ssh_reads_a_large_environment_when_it_has_connected(runner, monkeypatch):
    ssh = Path("ssh")
    ssh.write_text("#!/bin/sh\ncat pipe; cat > out\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")
    monkeypatch.setenv("BIG", "x" * 100_000)
    job = Job(command=("true",), ranks=1, forwarded=("BIG",))
    workers = Mock(**{"last_heard.return_value": 0.0, "is_reachable.return_value": False})
    with AgentProcesses(job, Path.cwd(), "/nowhere 00 00", 1000.0) as processes:
        arguments = [Host("far", 1)], True, workers
        tending = threading.Thread(target=processes.tend, args=arguments, daemon=True)
        tending.start()
        tending.join(PATIENCE)
        assert not tending.is_alive()
        Path("pipe").write_text("")
        processes.wait()
    assert json.loads(Path("out").read_text())["BIG"] == "x" * 100_000
