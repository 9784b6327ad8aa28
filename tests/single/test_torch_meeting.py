# SPDX-License-Identifier: Apache-2.0
"""StoreBootstrap: ranks meet in a store of c10d, whatever earlier attempts have left in it, and
whoever reads and writes it. Here they are threads of one process."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import FileStore, HashStore, PrefixStore

import farandole
from farandole.c10d import meeting
from farandole.c10d.meeting import StoreBootstrap, _name_of
from farandole.errors import LibraryError, StallError
from farandole.start import bootstrap, connection, sockets
from farandole.start.connection import open_connection
from farandole.start.rendezvous import RendezvousServer
from farandole.start.secret import job_secret, mac
from harness.process import Process

LONG, SHORT = 60.0, 1.0  # seconds
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
    monkeypatch.setattr(meeting, "shared_host", lambda: f"host {next(numbers)}")
    monkeypatch.setattr(bootstrap, "shared_host", lambda: f"host {next(numbers)}")


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
        with pytest.raises(StallError, match=r"rank.* \[?\d.*did not come to the"):
            StoreBootstrap(store, early, 3, SHORT)
    jobs = met([ranks.submit(StoreBootstrap, store, r, 3, LONG) for r in (2, 1, 0)])
    exchange(ranks, sorted(jobs, key=lambda job: job.rank))


def test_who_is_missing_is_named(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    jobs = [ranks.submit(StoreBootstrap, store, r, 4, 2.0) for r in (0, 1, 3)]
    for job in jobs:
        with pytest.raises(StallError, match=r"rank 2 did not come"):
            job.result(LONG)


def test_rank_0_gives_up_and_comes_again(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    """Whose time is over first ends the wait of all who are there; all may come again."""
    for _ in range(2):
        patient = ranks.submit(StoreBootstrap, store, 1, 3, LONG)
        with pytest.raises(StallError, match=r"rank 2 did not come|rank 1, rank 2 did not come"):
            StoreBootstrap(store, 0, 3, SHORT)
        if patient.exception(LONG) is None:
            raise AssertionError("a meeting without rank 2")
    exchange(ranks, met(start(ranks, store, 3)))


def test_worlds_of_other_sizes_in_one_store(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    """torchrun's elastic restart: its count of restarts says nothing of a rescale."""
    attempt = PrefixStore("attempt 0", store)
    for size in (3, 2, 4, 3):
        jobs = [ranks.submit(StoreBootstrap, attempt, r, size, LONG) for r in range(size)]
        exchange(ranks, met(jobs))
        with pytest.raises(StallError):  # a rank that was started too early
            StoreBootstrap(attempt, size - 1, size, SHORT)


# A script that keeps its size in the environment: a size without a rank is no launcher.
LATE = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, path, gave_up):
    import farandole.torch as hvd

    def begin(seconds):
        store = dist.FileStore(path, 2)
        limit = timedelta(seconds=seconds)
        dist.init_process_group("farandole", store=store, rank=rank, world_size=2, timeout=limit)

    if rank == 1:
        try:
            begin(1)
        except hvd.StallError as late:
            print(f"too early: {late}", flush=True)
        gave_up.set()
    begin(60)
    x = torch.tensor([10.0 ** rank])
    dist.all_reduce(x)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    print(f"rank {rank} has {x.item():g}", flush=True)
    dist.destroy_process_group()

fork = mp.get_context("fork")
gave_up = fork.Event()
ranks = [fork.Process(target=train, args=(rank, sys.argv[1], gave_up)) for rank in (1, 0)]
for rank in ranks:
    rank.start()
    gave_up.wait()
for rank in ranks:
    rank.join()
"""
# Rank 1 is started in each way and ends in each; rank 0 is forked.
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
            heard = "nothing"
        except farandole.PeerError as error:
            heard = error
        print("rank 0 heard:", heard, flush=True)

if __name__ == "__main__":
    for number, (method, ends) in enumerate(zip(sys.argv[2::2], sys.argv[3::2])):
        contexts = [mp.get_context("fork"), mp.get_context(method)]
        terms = (f"{sys.argv[1]}-{number}", ends)
        ranks = [c.Process(target=train, args=(r, *terms)) for r, c in enumerate(contexts)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
"""


def test_children_of_multiprocessing_leave_as_others_do(tmp_path: Path) -> None:
    ways = [
        ("fork", "raise ValueError('boom')", "ValueError: boom"),
        ("fork", "sys.exit(3)", "sys.exit(3)"),
        ("fork", "dist.all_reduce(torch.ones(3))", "nothing"),
        ("spawn", "sys.exit(3)", "sys.exit(3)"),
    ]
    (tmp_path / "program.py").write_text(CHILDREN)
    words = [word for method, ends, _ in ways for word in (method, ends)]
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"), *words]
    with Process(command, {"FARANDOLE_RENDEZVOUS": ""}) as job:
        out = job.end().check().out
    assert "died" not in out
    heard = re.findall("^rank 0 heard: (.*)$", out, re.MULTILINE)
    assert len(heard) == len(ways), out
    for line, (_, _, text) in zip(heard, ways, strict=True):
        assert text in line


def test_init_process_group_again_after_a_time_out(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LATE)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store")]
    with Process(command, {"FARANDOLE_RENDEZVOUS": "", "WORLD_SIZE": "2"}) as job:
        out = job.end().check().out
    assert "did not come to the" in out
    assert all(f"rank {rank} has 22" in out for rank in range(2)), out


# ---- strangers who read what ranks write into the store, and who write to it


@pytest.mark.usefixtures("hosts")
def test_hosts_without_a_secret_are_refused(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    for job in start(ranks, store, 3):
        with pytest.raises(LibraryError, match=r"ranks 0, [12] have no secret .*openssl rand"):
            job.result(LONG)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("trusts", ["0", "1"])
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_secret_that_one_rank_lacks(
    store: HashStore,
    ranks: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    lacks: int,
    trusts: str,
) -> None:
    """Nobody goes on without one because another rank, or a stranger in its name, has none."""
    monkeypatch.setenv("FARANDOLE_TRUST_NETWORK", trusts)
    for job in with_secrets(ranks, store, monkeypatch, [b""] * lacks + [SECRET.encode()], b""):
        says = r"FARANDOLE_JOB_SECRET differs" if trusts == "1" else r"ranks? .* ha\w+ no secret to"
        with pytest.raises(LibraryError, match=says):
            job.result(LONG)


def with_secrets(
    ranks: ThreadPoolExecutor,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    first: list[bytes],
    rest: bytes,
) -> list[Future[StoreBootstrap]]:
    """All ranks come, one after the other: rank 0 has the first of these secrets, and so on."""
    told: Queue[bytes] = Queue()
    monkeypatch.setattr(meeting, "job_secret", lambda: told.get(timeout=LONG))
    jobs = []
    for rank in range(3):
        jobs.append(ranks.submit(StoreBootstrap, store, rank, 3, LONG))
        told.put(first[rank] if rank < len(first) else rest)
        while not told.empty():
            jobs[-1].running()
    return jobs


@pytest.mark.usefixtures("hosts")
def test_a_secret_that_is_wrong_on_one_rank(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [SECRET.encode(), b"another secret of this job"]
    for job in with_secrets(ranks, store, monkeypatch, secrets, SECRET.encode()):
        with pytest.raises(LibraryError, match="or FARANDOLE_JOB_SECRET differs between"):
            job.result(LONG)


@pytest.mark.usefixtures("hosts")
def test_a_trusted_network(
    store: HashStore,
    ranks: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FARANDOLE_TRUST_NETWORK", "1")
    exchange(ranks, met(start(ranks, store, 3)))
    assert capfd.readouterr().err.count("FARANDOLE_TRUST_NETWORK=1: any process that reaches") == 1


def read_all(path: Path) -> bytes:
    """What a stranger finds in a store, as it is and decoded."""
    data = path.read_bytes()
    words = re.findall(rb"(?:[0-9a-f]{2}){8,}", data)
    return data + b"".join(bytes.fromhex(word.decode()) for word in words)


@pytest.mark.parametrize("several", [True, False])
def test_a_stranger_reads_the_store(
    several: bool, tmp_path: Path, ranks: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> None:
    """It finds nothing of what the ranks tell each other, nor the key."""
    if several:
        request.getfixturevalue("hosts")
        request.getfixturevalue("monkeypatch").setenv("FARANDOLE_JOB_SECRET", SECRET)
    path = tmp_path / "store"
    jobs = met(start(ranks, FileStore(str(path), 2), 2))
    words = [f"the word of rank {job.rank}, which is long enough".encode() for job in jobs]
    for _ in range(2):
        calls = [ranks.submit(job.allgather, word) for job, word in zip(jobs, words, strict=True)]
        assert [call.result(LONG) for call in calls] == [words, words]
    keys = {job.key(1, words) for job in jobs}
    assert len(keys) == 1, "all ranks derive the same one"
    found = read_all(path)
    assert b"rank 0 of 2" in found, "the stranger reads the right file"
    assert not [word for word in [*words, *keys] if word in found or word.hex().encode() in found]
    assert SECRET.encode() not in found


def test_each_world_and_each_blob_has_its_own_key(
    store: HashStore, ranks: ThreadPoolExecutor
) -> None:
    first, second = (met(start(ranks, store, 2)) for _ in range(2))
    keys = [
        {job.key(number, blobs) for job in jobs}
        for jobs in (first, second)
        for number in (1, 2)
        for blobs in ([b"ab", b"c"], [b"a", b"bc"])
    ]
    assert [len(each) for each in keys] == [1] * 8
    assert len(set.union(*keys)) == 8


SERVERS = ["nobody", "another job's", "of another secret", "no record", "a word of 1 MB"]
ADDRESSES = {  # each of which ended init() by an error of Python's own, or not at all
    "a port of words": "127.0.0.1:word",
    "a large port": "127.0.0.1:" + "9" * 5000,
    "no name of a host": f"a..b:9,{'x' * 70}:9",
    "zero": "a\0b:9",
    "an escape": "\x1b[2J:9",
    "a lone surrogate": "\udcff:9",
}


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("lie", SERVERS)
def test_a_stranger_names_another_server(
    lie: str, store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank tells no more to it than a random number, and says what is wrong; where nobody is, it
    waits for rank 0."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    server = RendezvousServer(2, b"another secret", here=False)
    other, waiting = HashStore(), []
    inner = PrefixStore("farandole", store)
    if lie == "another job's":  # of the same size, whose rank 0 waits for ranks
        waiting = [ranks.submit(StoreBootstrap, other, 0, 2, LONG, b"another job")]
        record = PrefixStore("farandole", other).get("rank 0 of 2")
        told = json.loads(record)
    else:
        address = "/nowhere/nobody,0:9" if lie == "nobody" else server.address
        told = ["far", address]
    text = {"no record": "{", "a word of 1 MB": "x" * (1 << 20)}.get(lie, json.dumps(told))
    inner.set("rank 0 of 2", text)
    with server:
        victim = ranks.submit(StoreBootstrap, store, 1, 2, 1.0 if lie == "nobody" else LONG)
        error, says = {
            "nobody": (StallError, "rank 0 did not come"),
            "no record": (LibraryError, "a stranger writes to"),
            "a word of 1 MB": (LibraryError, "a stranger writes to"),
        }.get(lie, (LibraryError, "that they are of one job .* a stranger writes"))
        with pytest.raises(error, match=says) as told_error:
            victim.result(LONG)
        assert len(str(told_error.value)) < 3000
        assert not server._clients
    if waiting:
        assert not waiting[0].done(), "rank 0 of the other job waits still: nobody has joined it"
        waiting.append(ranks.submit(StoreBootstrap, other, 1, 2, LONG, b"another job"))
        exchange(ranks, met(waiting))


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("how", [*ADDRESSES, "deep"])
def test_a_stranger_writes_what_is_no_address(
    how: str, store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks say so, or that the other one is missing; no terminal obeys what they print."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    root = ranks.submit(StoreBootstrap, store, 0, 2, LONG)
    inner = PrefixStore("farandole", store)
    record = json.loads(inner.get("rank 0 of 2"))
    text = "[" * 100_000 if how == "deep" else json.dumps([record[0], ADDRESSES.get(how)])
    inner.set("rank 0 of 2", text)
    victim = ranks.submit(StoreBootstrap, store, 1, 2, SHORT)
    with pytest.raises((LibraryError, StallError)) as told:
        victim.result(LONG)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 12_000
    with pytest.raises(LibraryError, match="a stranger writes to torch"):
        root.result(LONG / 2)


@pytest.mark.usefixtures("hosts")
def test_a_stranger_removes_what_rank_0_wrote(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reads it does not wait for as long as the store likes: half an hour."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    servers: list[RendezvousServer] = []

    class Noted(RendezvousServer):
        def __init__(self, *words: Any, **named: Any) -> None:
            super().__init__(*words, **named)
            servers.append(self)

    monkeypatch.setattr(meeting, "RendezvousServer", Noted)
    jobs = [ranks.submit(StoreBootstrap, store, rank, 3, 10.0) for rank in range(2)]
    inner = PrefixStore("farandole", store)
    while not (servers and 1 in [client.rank for client in list(servers[0]._clients)]):
        assert not [job for job in jobs if job.done()]
    assert inner.delete_key("rank 0 of 3")
    for job in jobs:
        with pytest.raises((LibraryError, StallError)):
            job.result(LONG)


@pytest.mark.usefixtures("hosts")
def test_a_stranger_names_many_silent_places(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a rank waits is the setting's, however many they are."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    name = sockets.path_of()
    inner = PrefixStore("farandole", store)
    with sockets.listen_at(name) as stranger:
        stranger.listen(1000)
        address = ",".join([name] * 100) + ",0:9"
        inner.set("rank 0 of 2", json.dumps(["far", address]))
        victim = ranks.submit(StoreBootstrap, store, 1, 2, SHORT)
        with pytest.raises(StallError, match=r"rank 0 did not come .*it is silent"):
            victim.result(LONG)
        stranger.setblocking(False)
        with stranger.accept()[0] as caller:
            assert caller.recv(1000).startswith(b"farandole session"), "it has reached the place"


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "/there,127.0.0.1:{}"])
def test_a_stranger_plays_rank_0_of_a_job_without_a_secret(
    address: str, store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host a Unix socket is the proof. By TCP a stranger proves what anybody can compute:
    it was rank 0, whose objects others unpickle."""
    monkeypatch.setattr(connection, "_is_own", lambda *_: False)  # it is another host's address
    root = ranks.submit(StoreBootstrap, store, 0, 2, SHORT)
    inner = PrefixStore("farandole", store)
    record = json.loads(inner.get("rank 0 of 2"))
    secret = mac(b"", b"", _name_of(store), b"2")  # as the ranks derive theirs
    with RendezvousServer(2, secret, here=False) as server:
        port = server.address.rpartition(":")[2]
        inner.set("rank 0 of 2", json.dumps([record[0], address.format(port)]))
        with open_connection(f"127.0.0.1:{port}", secret):
            pass  # what the stranger proves is what the rank would prove
        victim = ranks.submit(StoreBootstrap, store, 1, 2, SHORT)
        with pytest.raises(LibraryError, match="a stranger writes to"):
            victim.result(LONG)
        assert not [client for client in server._clients if client.rank == 1]
    with pytest.raises((LibraryError, StallError)):
        root.result(LONG)


def test_a_rendezvous_without_a_secret_is_on_this_host() -> None:
    with pytest.raises(PermissionError, match="must be on this host"):
        open_connection("/nobody,127.0.0.1:80", b"")


@pytest.mark.usefixtures("hosts")
def test_a_recorded_meeting_cannot_be_used_again(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger plays to rank 1 all that rank 0 has said to it, and says nothing else."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    said: list[bytes] = []
    flush = RendezvousServer._flush

    def records(server: RendezvousServer, client: Any) -> None:
        if client.rank == 1 or not client.session.proved:
            said.append(bytes(client.session.outgoing))
        flush(server, client)

    monkeypatch.setattr(RendezvousServer, "_flush", records)
    exchange(ranks, met(start(ranks, store, 2)))
    monkeypatch.setattr(RendezvousServer, "_flush", flush)
    inner = PrefixStore("farandole", store)
    record = json.loads(inner.get("rank 0 of 2"))
    place = sockets.path_of()
    with sockets.listen_at(place) as stranger:
        stranger.listen()
        inner.set("rank 0 of 2", json.dumps([record[0], f"{place},0:9"]))
        victim = ranks.submit(StoreBootstrap, store, 1, 2, LONG)
        while not victim.done():
            stranger.settimeout(0.1)
            with suppress(OSError):
                caller, _ = stranger.accept()
                with caller:
                    caller.sendall(b"".join(said))
                    heard = caller.recv(1000)
                    assert heard.startswith(b"farandole session"), "the victim is there"
        with pytest.raises(LibraryError, match="not prove to each other that they are of one job"):
            victim.result()


@pytest.mark.usefixtures("hosts")
def test_a_strangers_note_is_cut_and_made_printable(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to the store can keep a job from starting, and no more."""
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    job = ranks.submit(StoreBootstrap, store, 0, 2, LONG)
    inner = PrefixStore("farandole", store)
    address = json.loads(inner.get("rank 0 of 2"))[1]
    inner.set(f"notes at {address}", "\x1b[2J\x07no\n" + "x" * 100_000)
    with pytest.raises(LibraryError, match=r"init\(\): .*\[2J") as told:
        job.result(LONG)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 3000


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
