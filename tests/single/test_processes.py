# SPDX-License-Identifier: Apache-2.0
"""What the supervisor knows of processes on its own host, and that it ends them, stopped or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from farandole.launch.processes import LocalProcesses
from farandole.start.supervised import Whereabouts

Child = subprocess.Popen[bytes]


@pytest.fixture
def children() -> Iterator[tuple[Child, Child]]:
    """Two that wait."""
    wait = [sys.executable, "-c", "import signal; signal.pause()"]
    both = (subprocess.Popen(wait), subprocess.Popen(wait))
    yield both
    for child in both:
        child.kill()
        child.wait()


def at(child: Child) -> Whereabouts:
    return Whereabouts.own()._replace(pid=child.pid)


def stop(child: Child) -> None:
    """Returns when it is stopped."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


def test_one_that_is_stopped(children: tuple[Child, Child]) -> None:
    found = LocalProcesses()
    found.add("rank 0", at(children[0]))
    found.add("rank 1", at(children[1]))
    stop(children[1])
    while not (name := found.stopped(0.05)):
        pass
    assert name == "rank 1"
    assert found.stopped(0.05) == "rank 1"
    children[1].send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, children[1].pid, os.WCONTINUED)
    assert not found.stopped(0.05), "it begins anew"
    found.kill()


def test_all_are_ended(children: tuple[Child, Child]) -> None:
    found = LocalProcesses()
    found.add("rank 0", at(children[0]))
    found.add_child("the launcher", children[1].pid)
    stop(children[0])
    assert found.outliving(0.01) == ["rank 0", "the launcher"]
    found.kill()
    assert [child.wait(10) for child in children] == [-signal.SIGKILL] * 2
    assert found.outliving(10.0) == []


def test_those_that_are_elsewhere_or_have_ended(children: tuple[Child, Child]) -> None:
    """A number says nothing about a process of another host, or of another container."""
    found = LocalProcesses()
    found.add("rank 0", at(children[0])._replace(host="elsewhere"))
    found.add("rank 1", at(children[0])._replace(space="pid:[1]"))
    found.add("rank 2", at(children[0])._replace(space=""))
    children[1].kill()
    children[1].wait()
    found.add("rank 3", at(children[1]))
    assert found.outliving(0.0) == []
    found.kill()
    assert children[0].poll() is None


def test_another_process_in_its_place(children: tuple[Child, Child]) -> None:
    """Each of several programs in turn is a rank."""
    found = LocalProcesses()
    found.add("rank 0", at(children[0]))
    found.add("rank 0", at(children[1]))
    found.kill()
    assert children[1].wait(10) == -signal.SIGKILL
    assert children[0].poll() is None


def test_whereabouts_are_a_text() -> None:
    own = Whereabouts.own()
    assert Whereabouts.parse(str(own)) == own
    assert own.pid == os.getpid()
    assert Whereabouts.parse("host 12 ").space == ""
