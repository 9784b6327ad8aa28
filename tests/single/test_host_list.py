# SPDX-License-Identifier: Apache-2.0
"""Which hosts an elastic job uses, by discovery; and its options."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from farandole.launch import agent
from farandole.launch import host_list as host_list_module
from farandole.launch.host_list import HostList
from farandole.launch.job import Host
from farandole.tools import cli

A, B = Host("a", 2), Host("b", 4)


def script(folder: Path, text: str) -> str:
    (folder / "script").write_text(text)
    return f"sh {folder}/script"


def test_what_a_script_prints(tmp_path: Path) -> None:
    said: list[str] = []
    command = script(tmp_path, "echo a:2; echo; echo ' b '; echo a:4")
    with HostList((), command, 3, said.append) as host_list:
        assert host_list.hosts == (Host("a", 4), Host("b", 3)), "the last line of a host counts"
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
    said: list[str] = []
    host_list = HostList((A,), script(tmp_path, text), 1, said.append)
    with monkeypatch.context() as patched:
        if "sleep" in text:
            patched.setattr(host_list_module, "_SCRIPT_SECONDS", 0.2)
        host_list.look()
        host_list.look()
    assert host_list.hosts == (A,)
    assert len(said) == 1, "told once"
    assert told in said[0]
    script(tmp_path, "echo b:4")
    host_list.look()
    assert host_list.hosts == (B,)


def test_a_script_that_prints_nothing_means_no_host(tmp_path: Path) -> None:
    said: list[str] = []
    host_list = HostList((A,), script(tmp_path, "true"), 1, said.append)
    host_list.look()
    assert host_list.hosts == ()
    assert not said


def test_nothing_of_a_script_that_hangs_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_list_module, "_SCRIPT_SECONDS", 1.0)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    HostList((), script(tmp_path, f"sleep 60 > {tmp_path}/pipe; true"), 1, print).look()
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


WAITS = "import time; print('here', flush=True); time.sleep(600)"


def test_a_new_agent_ends_the_one_before_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of other folders or hosts, nor programs that only have such words. A Python that
    was built for an old Linux lacks what is deleted here."""
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(signal, "pidfd_send_signal")
    folder = str(tmp_path)
    commands = {
        "the one before": [agent.MODULE, folder, "--host", "a"],
        "another host's": [agent.MODULE, folder, "--host", "b"],
        "another folder's": [agent.MODULE, f"{folder}/x", "--host", "a"],
        "no agent": ["vi", folder, "--host", "a"],
    }
    with ExitStack() as stack:
        started = {}
        for what, words in commands.items():
            command = [sys.executable, "-c", WAITS, *words]
            one = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(one.kill)
            assert one.stdout is not None
            one.stdout.readline()
            started[what] = one
        agent.kill_predecessor(folder, "a")
        ended = [what for what, one in started.items() if one.poll() is not None]
        assert ended == ["the one before"]
