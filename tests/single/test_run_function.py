# SPDX-License-Identifier: Apache-2.0
"""farandole.run(): results in rank order, exceptions as themselves, ranks that say nothing."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import farandole
from farandole.launch import function
from farandole.launch.result_server import Outcome, ResultServer
from farandole.start import agent_client
from farandole.start.connection import open_connection


class OfTheScript(Exception):
    pass


def sums(scale):
    import numpy as np

    import farandole

    farandole.init()
    rank = farandole.rank()
    return rank, farandole.allreduce(np.full(3, scale + rank), op=farandole.Sum)


def test_results_come_in_rank_order():
    results = farandole.run(sums, (2.0,), np=3)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, total in results:
        np.testing.assert_array_equal(total, np.full(3, 9.0))


def test_what_a_rank_prints_appears_here(capsys):
    farandole.run(lambda: print("from a rank", flush=True), np=2)
    assert capsys.readouterr().out.splitlines() == ["from a rank"] * 2


def test_an_exception_comes_back_as_itself():
    def fail(bad):
        import farandole

        farandole.init()
        if farandole.rank() == bad:
            raise OfTheScript("my bug")
        farandole.barrier()  # PeerError: not the one that is raised here

    with pytest.raises(OfTheScript, match="my bug") as caught:
        farandole.run(fail, kwargs={"bad": 1}, np=2)
    assert caught.value.rank == 1
    assert "on rank 1" in str(caught.value.__cause__)
    assert 'raise OfTheScript("my bug")' in str(caught.value.__cause__)


def test_a_rank_that_is_killed_is_named():
    def die():
        import farandole

        farandole.init()
        if farandole.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        farandole.barrier()

    with pytest.raises(farandole.PeerError, match=r"ranks \[.*1\] ended without a result"):
        farandole.run(die, np=2)


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(TypeError, match="pickle"):
        farandole.run(lambda: (x for x in ()), np=1)


def test_environment_of_the_ranks():
    def value():
        return os.environ["OF_THE_JOB"], "FARANDOLE_RUN_KEY" in os.environ

    assert farandole.run(value, np=2, environment={"OF_THE_JOB": "x"}) == [("x", False)] * 2


def test_ranks_that_do_not_start_are_named(tmp_path):
    launcher = tmp_path / "mpirun"
    launcher.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.11' && exit\nexec sleep 60\n"
    )
    launcher.chmod(0o755)
    with pytest.raises(farandole.StallError, match=r"ranks \[0, 1\] have not started within 0\.5"):
        farandole.run(sums, (1.0,), np=2, launcher=str(launcher), start_timeout=0.5)


def test_a_door_leaves_no_file():
    with (
        ResultServer(1, b"work", True) as home,
        open_connection(home.address, bytes.fromhex(home.key)),
    ):
        assert Path(home.address).is_socket()
    assert not Path(home.address).exists()


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
def test_results_that_come_late(size):
    """settle() waits for what a rank has begun to send when the launcher has ended."""
    result = os.urandom(size)
    with ResultServer(1, b"work", True) as home:
        client = open_connection(home.address, bytes.fromhex(home.key))
        assert client.receive() == b"work"
        found = []
        waiting = threading.Thread(target=lambda: (home.wait(60.0), found.append(home.outcomes)))
        waiting.start()
        client.send(Outcome(result).encode())
        client.close()
        waiting.join()
        assert found == [{0: Outcome(result)}]


def test_an_agent_that_is_gone_is_named(monkeypatch):
    monkeypatch.setenv(agent_client.AGENT, "/nowhere/nobody 0 1.1")
    with pytest.raises(farandole.LibraryError, match=r"the agent of this host.*No such file"):
        agent_client.connect()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_no_rank_stays_if_its_output_cannot_be_read(monkeypatch, error):
    """The launcher has started already."""
    launchers, start = [], threading.Thread.start

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            launchers.append(self)

    def interrupted(thread):
        if thread._target is function._copy:
            raise error
        start(thread)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(type(error)):
        farandole.run(time.sleep, (3600,), np=1)
    assert launchers
    assert None not in [launcher.returncode for launcher in launchers]
