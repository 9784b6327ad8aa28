# SPDX-License-Identifier: Apache-2.0
"""Which hosts an elastic job uses, by discovery; and its options."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import farandole
from farandole.launch import agent
from farandole.launch import roster as roster_module
from farandole.launch.job import Host
from farandole.launch.roster import Roster
from farandole.tools import cli

A, B = Host("a", 2), Host("b", 4)


def script(folder: Path, text: str) -> str:
    (folder / "script").write_text(text)
    return f"sh {folder}/script"


def test_what_a_script_prints(tmp_path: Path) -> None:
    said: list[str] = []
    command = script(tmp_path, "echo a:2; echo; echo ' b '; echo a:4")
    with Roster((), command, 3, said.append) as roster:
        assert roster.hosts == (Host("a", 4), Host("b", 3)), "the last line of a host counts"
    assert not said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo 'a:many'", "'a:many' is not a host"),
        ("echo 'Usage: hosts [-h]'", "'Usage: hosts [-h]' is not a host"),
        ("echo b:2; echo oops >&2; exit 4", "ended with 4: oops"),
        ("exec sleep 60", "timed out after 0.2 seconds"),
    ],
)
def test_what_is_no_list_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    if "sleep" in text:
        monkeypatch.setattr(roster_module, "_SCRIPT_SECONDS", 0.2)
    said: list[str] = []
    roster = Roster((A,), script(tmp_path, text), 1, said.append)
    roster.look()
    roster.look()
    assert roster.hosts == (A,)
    assert len(said) == 1, "told once"
    assert told in said[0]
    script(tmp_path, "echo b:4")
    roster.look()
    assert roster.hosts == (B,)


def test_a_script_that_prints_nothing_means_no_host(tmp_path: Path) -> None:
    said: list[str] = []
    roster = Roster((A,), script(tmp_path, "true"), 1, said.append)
    roster.look()
    assert roster.hosts == ()
    assert not said


def test_nothing_of_a_script_that_hangs_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "_SCRIPT_SECONDS", 1.0)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    Roster((), script(tmp_path, f"sleep 60 > {tmp_path}/pipe; true"), 1, print).look()
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    assert poll.poll(20_000), "the pipe's writer still runs"
    os.close(reader)


def test_a_supervisor_outlives_its_reader() -> None:
    """As in `farandole run --elastic ... 2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    words = "from farandole.launch.agent import say; say('start 1'); say('start 2')"
    done = subprocess.run([sys.executable, "-c", words], stderr=writer)
    os.close(writer)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-np 2 --min-np 3", "--min-np 3 and --max-np 2 contradict"),
        ("-np 0 -H localhost:2", "'0' is not a whole number of at least 1"),
        ("-np 2 --max-np 0", "'0' is not a whole number of at least 1"),
        ("--elastic", "the number of ranks is missing: pass -np N"),
        ("--min-np 3 -H localhost:2", "2 slots do not hold 3 ranks"),
        ("-np 3 --elastic --oversubscribe -H localhost:2", "2 slots do not hold 3 ranks"),
        ("-np 1 --elastic --elastic-timeout nan", "must be at least 0"),
        ("-np 1 --elastic -x FARANDOLE_GRACE=soon", "FARANDOLE_GRACE='soon' is not a number"),
        ("-np 1 --elastic --restarts -1", "--restarts and --elastic-timeout must be at least 0"),
        ("-np 1 --elastic --blacklist-cooldown-range 5 1", "0 <= MIN <= MAX"),
        ("-np 1 --reset-limit 3", "--restarts, which limits"),
        ("-np 1 --restarts 3", "--restarts is for elastic jobs: add --elastic"),
        ("-np 1 --elastic-timeout 600", "--elastic-timeout is for elastic jobs"),
        ("-np 1 --blacklist-cooldown-range 10 600", "--blacklist-cooldown-range is for elastic"),
        ("-np 1 --slots-per-host 1", "--slots-per-host is for elastic jobs"),
        ("-np 1 --checkpoint-dir x", "--checkpoint-dir is for elastic jobs"),
        ("-np 1 --host-discovery-script /no/script", "--host-discovery-script: /no/script ended"),
        ("-np 1 --host-discovery-script /etc/passwd", "ended with 126"),
    ],
)
def test_options_that_contradict(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    try:
        code = cli.main(["run", *words.split(), "true"])
    except SystemExit as end:  # argparse's own way
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert told in capsys.readouterr().err


HOLDS = """
import fcntl, sys, time
lock = open(sys.argv[1], "r+")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("has it", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("word", "replaced"), [("agent", True), ("other", False)])
def test_only_an_agent_of_this_folder_is_replaced(
    tmp_path: Path, word: str, replaced: bool
) -> None:
    """A lock that outlives its host may name any process of this user."""
    first = agent._only_one(tmp_path, "a", False)
    assert first is not None
    os.close(first)
    (path,) = tmp_path.glob("agent-*.lock")
    command = [sys.executable, "-c", HOLDS, str(path), word, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert agent._only_one(tmp_path, "a", False) is None
        assert (holder.poll(), agent._only_one(tmp_path, "b", True) is None) == (None, False)
        assert (agent._only_one(tmp_path, "a", True) is not None) == replaced
        assert (holder.poll() is not None) == replaced
        holder.kill()


def test_a_stranger_cannot_take_an_agents_place(tmp_path: Path) -> None:
    """The names of sockets can be guessed; in a folder where others may write is no agent."""
    folder = tmp_path.absolute()
    place = hashlib.sha256(f"{folder} a".encode()).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0farandole-agent-{place}")
        assert agent._only_one(folder, "a", False) is not None
    folder.chmod(0o777)
    with pytest.raises(farandole.CheckpointError):
        agent._only_one(folder, "a", False)
