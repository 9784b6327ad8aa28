# SPDX-License-Identifier: Apache-2.0
"""Strangers who read what ranks write into torch's store, and who write to it; and the secret that
keeps them out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import FileStore, HashStore, PrefixStore

import farandole
from farandole.c10d import meeting
from farandole.c10d.meeting import StoreBootstrap
from farandole.errors import LibraryError, PeerError
from farandole.start.secret import job_secret
from harness.meetings import LONG, SECRET, exchange, hosts, met, ranks, start, store

__all__ = ["hosts", "ranks", "store"]


@pytest.mark.usefixtures("hosts")
def test_hosts_without_a_secret_are_refused(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    for job in start(ranks, store, 3):
        with pytest.raises(LibraryError, match=r"ranks 0, 1, 2 have no secret .*openssl rand"):
            job.result(LONG)


@pytest.mark.usefixtures("hosts")
def test_a_secret_that_one_rank_lacks(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on without one because another rank, or a stranger in its name, has none."""
    secrets = [b"", SECRET.encode(), SECRET.encode()]
    monkeypatch.setattr(meeting, "job_secret", secrets.pop)
    monkeypatch.setenv("FARANDOLE_TRUST_NETWORK", "1")
    for job in start(ranks, store, 3):
        with pytest.raises(LibraryError, match=r"rank \d has no secret to hide keys"):
            job.result(LONG)


@pytest.mark.usefixtures("hosts")
def test_a_secret_that_is_wrong_on_one_rank(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [b"another secret of this job", SECRET.encode()]
    monkeypatch.setattr(meeting, "job_secret", secrets.pop)
    jobs = met(start(ranks, store, 2))
    told = [ranks.submit(job.allgather, b"mine") for job in jobs]
    for call in told:
        with pytest.raises(LibraryError, match="or FARANDOLE_JOB_SECRET differs there"):
            call.result(LONG)


@pytest.mark.usefixtures("hosts")
def test_a_trusted_network(
    store: HashStore,
    ranks: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FARANDOLE_TRUST_NETWORK", "1")
    exchange(ranks, met(start(ranks, store, 3)))
    assert capfd.readouterr().err.count("FARANDOLE_TRUST_NETWORK=1: the job's keys pass") == 1


def read_all(path: Path) -> bytes:
    """What a stranger finds in a store, as it is and decoded."""
    data = path.read_bytes()
    words = re.findall(rb"(?:[0-9a-f]{2}){8,}", data)
    return data + b"".join(bytes.fromhex(word.decode()) for word in words)


@pytest.mark.parametrize("several", [True, False])
def test_a_stranger_reads_the_store(
    several: bool, tmp_path: Path, ranks: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> None:
    """It finds nothing of what the ranks tell each other, such as keys."""
    if several:
        request.getfixturevalue("hosts")
        request.getfixturevalue("monkeypatch").setenv("FARANDOLE_JOB_SECRET", SECRET)
    path = tmp_path / "store"
    jobs = met(start(ranks, FileStore(str(path), 2), 2))
    keys = [f"the key of rank {job.rank}, which is long enough".encode() for job in jobs]
    for _ in range(2):
        calls = [ranks.submit(job.allgather, key) for job, key in zip(jobs, keys, strict=True)]
        assert [call.result(LONG) for call in calls] == [keys, keys]
    found = read_all(path)
    assert not [key for key in keys if key in found or key.hex().encode() in found]
    assert SECRET.encode() not in found


class Overwritten:
    """A store in which a stranger's values take the places of others."""

    def __init__(self, store: Store, change: Callable[[str, str], str]) -> None:
        self._store, self._change = store, change

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._change(key, value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    "change", ["a bit", "another rank's", "another round's", "no hex", "short"]
)
def test_a_stranger_writes_to_the_store(
    change: str, store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank that reads it says so, and believes nothing of it."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    jobs = met(start(ranks, store, 3))
    exchange(ranks, jobs)  # the rounds 1 and 2
    seen: dict[str, str] = {}

    def written(key: str, value: str) -> str:
        seen[key] = value
        lies = {
            "a bit": f"{int(value[:2], 16) ^ 1:02x}{value[2:]}",
            "another rank's": jobs[0]._store.get("2/0").decode(),
            "another round's": jobs[0]._store.get("2/1").decode(),
            "no hex": "no hex",
            "short": "00",
        }
        return lies[change] if key == "3/1" else value

    for job in jobs:
        job._store = Overwritten(job._store, written)  # type: ignore[assignment]
    calls = [ranks.submit(job.allgather, b"mine") for job in jobs]
    for call in calls:
        with pytest.raises(LibraryError, match=r"has for rank 1 what that rank.* did not write"):
            call.result(LONG)


@pytest.mark.usefixtures("hosts")
def test_a_recorded_meeting_cannot_be_used_again(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger leads rank 1 into an old meeting, with all that rank 0 said there."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    first = met(start(ranks, store, 2))
    calls = [ranks.submit(job.allgather, b"old") for job in first]
    assert [call.result(LONG) for call in calls] == [[b"old", b"old"]] * 2
    inner, old = PrefixStore("farandole", store), meeting_of(store)
    ticket = before = inner.get("ticket of 1").decode()
    victim = ranks.submit(StoreBootstrap, store, 1, 2, LONG)
    while ticket == before:
        ticket = inner.get("ticket of 1").decode()
    inner.set(f"meeting of {ticket}", old)
    (lone,) = met([victim])
    with pytest.raises(LibraryError, match=r"has for rank 0 what that rank.* did not write"):
        lone.allgather(b"new", LONG)


def meeting_of(store: HashStore) -> str:
    """The name of the last meeting, as a stranger learns it."""
    inner = PrefixStore("farandole", store)
    return inner.get(f"meeting of {inner.get('ticket of 1').decode()}").decode()


@pytest.mark.parametrize("name", ["00" * 16, "../../tmp/x", "", "x" * 5000])
def test_a_stranger_names_the_socket(
    name: str, store: HashStore, ranks: ThreadPoolExecutor
) -> None:
    """Ranks of one host go to no socket but rank 0's, and say what is wrong."""
    jobs = met(start(ranks, store, 2))
    jobs[1]._store.set("socket", name)
    with pytest.raises(PeerError, match=r"rank 0 does not answer at the socket .* a stranger"):
        jobs[1]._at_socket()


@pytest.mark.parametrize(
    ("mode", "text", "wrong"),
    [
        (0o600, SECRET, ""),
        (0o400, f"  {SECRET}\n", ""),
        (0o640, SECRET, "others may use it too; remedy: chmod 600"),
        (0o602, SECRET, "others may use it too"),
        (0o600, "short", "has 5 characters, which a stranger could guess"),
        (0o600, "", "has 0 characters"),
    ],
)
def test_the_file_of_the_secret(
    mode: int, text: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual one, which a shared home folder has."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert job_secret() == b""
    (tmp_path / "farandole").mkdir()
    path = tmp_path / "farandole" / "job-secret"
    path.write_text(text)
    path.chmod(mode)
    if wrong:
        with pytest.raises(LibraryError, match=wrong):
            job_secret()
    else:
        assert job_secret() == SECRET.encode()
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET[::-1])
    assert job_secret() == SECRET[::-1].encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file of another user")
def test_a_secret_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    os.chown(path, 65534, -1)
    monkeypatch.setenv("FARANDOLE_JOB_SECRET_FILE", str(path))
    with pytest.raises(LibraryError, match="belongs to user 65534, not to this one"):
        job_secret()


def test_a_secret_that_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe is not waited for."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, wrong in {
        "pipe": "it is no file",
        "": "it is no file",
        "none": "is not there",
    }.items():
        monkeypatch.setenv("FARANDOLE_JOB_SECRET_FILE", str(tmp_path / name))
        with pytest.raises(LibraryError, match=wrong):
            job_secret()
    monkeypatch.setenv("FARANDOLE_JOB_SECRET_FILE", "none")
    assert job_secret() == b""


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    row = next(v for v in farandole.config() if v.name == "FARANDOLE_JOB_SECRET")
    assert row.value == "(hidden)"
    assert SECRET not in str(farandole.config())
