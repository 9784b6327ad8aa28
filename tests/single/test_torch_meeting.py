# SPDX-License-Identifier: Apache-2.0
"""StoreBootstrap: ranks meet in a store of c10d, whatever earlier attempts have left in it, and
whoever reads and writes it. Here they are threads of one process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import FileStore, HashStore, PrefixStore

import farandole
from farandole.c10d import meeting
from farandole.c10d.meeting import StoreBootstrap
from farandole.errors import LibraryError, PeerError, StallError
from farandole.start.secret import job_secret
from harness.process import Process

LONG, SHORT = 60.0, 0.3  # seconds
SECRET = "a secret of the job's own"


def start(ranks: ThreadPoolExecutor, store: Store, size: int) -> list[Future[StoreBootstrap]]:
    """All ranks of a meeting come."""
    return [ranks.submit(StoreBootstrap, store, r, size, LONG) for r in range(size)]


def met(jobs: list[Future[StoreBootstrap]]) -> list[StoreBootstrap]:
    """The ranks, when they have met."""
    return [job.result(LONG) for job in jobs]


def exchange(ranks: ThreadPoolExecutor, jobs: list[StoreBootstrap]) -> None:
    """Every rank receives what every rank of this very meeting has sent."""
    for number in range(2):
        told = [f"{number} of {job.rank}".encode() for job in jobs]
        calls = [ranks.submit(job.allgather, data) for job, data in zip(jobs, told, strict=True)]
        assert all(call.result(LONG) == told for call in calls)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes itself for one on a host of its own, in each meeting another one."""
    numbers = count()
    monkeypatch.setattr(meeting, "_host", lambda: f"host {next(numbers)}")


# ---- again and again


@pytest.mark.parametrize("size", [1, 2, 4])
def test_again_and_again(store: HashStore, ranks: ThreadPoolExecutor, size: int) -> None:
    for _ in range(3):
        jobs = met([ranks.submit(StoreBootstrap, store, r, size, LONG) for r in range(size)])
        exchange(ranks, jobs)


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_that_gave_up_alone_meets_the_others_later(
    store: HashStore, ranks: ThreadPoolExecutor, early: int
) -> None:
    for _ in range(2):
        with pytest.raises(StallError, match=r"ranks \[\d.*did not come to the meeting"):
            StoreBootstrap(store, early, 3, SHORT)
    jobs = met([ranks.submit(StoreBootstrap, store, r, 3, LONG) for r in (2, 1, 0)])
    exchange(ranks, sorted(jobs, key=lambda job: job.rank))


def test_who_is_missing_is_named(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    jobs = [ranks.submit(StoreBootstrap, store, r, 4, 2.0) for r in (0, 1, 3)]
    for job in jobs:
        with pytest.raises(StallError, match=r"ranks \[2\] did not come"):
            job.result(LONG)


def test_rank_0_gives_up_and_comes_again(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    """The others wait on, in the meeting that it has left."""
    patient = ranks.submit(StoreBootstrap, store, 1, 3, LONG)
    for _ in range(2):
        with pytest.raises(StallError, match=r"2\] did not come"):
            StoreBootstrap(store, 0, 3, SHORT)
    rest = [ranks.submit(StoreBootstrap, store, r, 3, LONG) for r in (0, 2)]
    exchange(ranks, sorted(met([patient, *rest]), key=lambda job: job.rank))


def test_worlds_of_other_sizes_in_one_store(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    """torchrun's elastic restart: its count of restarts says nothing of a rescale."""
    attempt = PrefixStore("attempt 0", store)
    for size in (3, 2, 4, 3):
        jobs = [ranks.submit(StoreBootstrap, attempt, r, size, LONG) for r in range(size)]
        exchange(ranks, met(jobs))
        with pytest.raises(StallError):  # a rank that was started too early
            StoreBootstrap(attempt, size - 1, size, SHORT)


@pytest.mark.usefixtures("hosts")
def test_a_wait_that_timed_out_leaves_the_meeting_usable(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    first, second = met([ranks.submit(StoreBootstrap, store, r, 2, LONG) for r in range(2)])
    with pytest.raises(StallError, match=r"ranks \[1\]"):
        first.allgather(b"0", SHORT)
    assert second.allgather(b"1", LONG) == [b"0", b"1"]


PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import farandole.torch as hvd

path, rank = sys.argv[1], int(sys.argv[2])

def begin(seconds):
    store = dist.FileStore(path, 2)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("farandole", store=store, rank=rank, world_size=2, timeout=limit)

if rank == 1:
    try:
        begin(1)
    except hvd.StallError as late:
        print(f"too early: {late}", flush=True)
begin(60)
x = torch.tensor([10.0 ** rank])
dist.all_reduce(x)
dist.all_reduce(x, group=dist.new_group([0, 1]))
print(f"rank {rank} has {x.item():g}", flush=True)
dist.destroy_process_group()
"""


def test_world_size_without_a_rank_is_no_launcher(tmp_path: Path) -> None:
    """A script that torch.multiprocessing starts, and that keeps its size in the environment."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("if rank == 1:", "if False:"))
    command = [sys.executable, str(path), str(tmp_path / "store")]
    variables = {"FARANDOLE_RENDEZVOUS": "", "WORLD_SIZE": "2"}
    first, second = (Process([*command, str(rank)], variables) for rank in range(2))
    with first, second:
        for job in (first, second):
            assert "has 22" in job.end().check().out


CHILDREN = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, path, ends):
    import farandole.torch
    dist.init_process_group("farandole", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        exec(ends)
    else:
        try:
            dist.all_reduce(torch.ones(3))
        except farandole.PeerError as error:
            print("rank 0 heard:", error, flush=True)

if __name__ == "__main__":
    _, path, method, ends = sys.argv
    context = mp.get_context(method)
    ranks = [context.Process(target=train, args=(r, path, ends)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("ends", "heard"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("sys.exit(3)", "sys.exit(3)"),
        ("dist.all_reduce(torch.ones(3))", ""),
    ],
)
def test_children_of_multiprocessing_leave_as_others_do(
    tmp_path: Path, method: str, ends: str, heard: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(CHILDREN)
    command = [sys.executable, str(path), str(tmp_path / "store"), method, ends]
    with Process(command, {"FARANDOLE_RENDEZVOUS": ""}) as job:
        out = job.end().out
    assert "died" not in out
    assert ("rank 0 heard" in out) == bool(heard)
    assert heard in out


def test_init_process_group_again_after_a_time_out(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), str(tmp_path / "store")]
    with Process([*command, "1"], {"FARANDOLE_RENDEZVOUS": ""}) as early:
        early.wait_for_output("ranks [0] did not come")
        with Process([*command, "0"], {"FARANDOLE_RENDEZVOUS": ""}) as late:
            for job in (early, late):
                assert "has 22" in job.end().check().out


# ---- strangers who read what ranks write into the store, and who write to it


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
        with pytest.raises(LibraryError, match=r"holds data for rank 1 that nobody.* wrote"):
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
    with pytest.raises(LibraryError, match=r"holds data for rank 0 that nobody.* wrote"):
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
        "pipe": "it is not a regular file",
        "": "it is not a regular file",
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
