# SPDX-License-Identifier: Apache-2.0
"""Commits of elastic training on the disk: what they hold, and what is refused: files and folders
of other users, links, pickles, and files that are damaged or made to do damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import farandole as fd
from farandole import commits
from farandole.commits import FILE, Saved
from farandole.membership.messages import Commit
from harness.commits import linked, owned_by_another, read_commit, write_commit

Point = namedtuple("Point", "x y")

VALUES: dict[str, Any] = {
    "plain": [1, -(2**70), 0.1, float("inf"), True, None, "naïve", {}],
    "keys": {1: "a", (2, "b"): [3], None: {"$": 4}, False: 5},
    "ordered": OrderedDict(b=1, a=2),
    "counted": Counter("abca"),
    "groups": (1, ("x",), {3, 4}, frozenset({(5, 6)}), []),
    "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
    "complex": 3 - 4j,
    "nan": np.array([np.nan, -0.0, 1e-310]),
    "arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 4), "f4"), np.array(7, "u2")],
    "times": np.array(["2026-01-02", "NaT"], "M8[s]"),
    "texts": np.array(["a", "bcd"]),
    "turned": np.asfortranarray(np.arange(12.0).reshape(3, 4)).T,
    "brain": np.arange(5).astype(ml_dtypes.bfloat16),
    "number": np.float32(1.5),
    "point": Point(np.arange(3), [Point(1, 2)]),
    "__metadata__": np.arange(2),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "call-1"


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_values_come_back_with_their_types(folder: Path) -> None:
    write_commit(folder, VALUES)
    found = read_commit(folder, VALUES)
    assert found is not None
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert same(found[name], value), name
    found["arrays"][0][:] = 0  # it is the reader's own


def test_tensors_and_states_of_torch(folder: Path) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    values = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": [torch.randn(4, 3).T, torch.arange(3).bfloat16(), torch.empty(0, 2)],
        "more": (torch.tensor(True), torch.tensor([1 + 2j], dtype=torch.complex64)),
    }
    write_commit(folder, values)
    found = read_commit(folder, {})
    assert found is not None
    for name, value in values.items():
        assert same(found[name], value), name
    assert found["model"]._metadata == values["model"]._metadata


def test_the_format_is_that_of_safetensors(folder: Path) -> None:
    """The library reads it."""
    from safetensors.numpy import load_file

    values = {"weights": torch.arange(6.0).reshape(2, 3), "step": 7, "seen": np.arange(3)}
    write_commit(folder, values)
    assert load_file(folder / FILE)["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (folder / FILE).stat().st_size % 8 == 0


class Own:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Own(), r"state, step\.a\.1: .* type Own .* can hold .*tensors of PyTorch"),
        (lambda: 0, r"step\.a\.1: .* type function"),
        (np.array([Own()]), r"step\.a\.1: .* type ndarray"),
        (np.zeros(2, "i4,f4"), r"step\.a\.1: .* type ndarray"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), r"step\.a\.1: .* type MaskedArray"),
        (np.zeros(2, np.dtype(ml_dtypes.bfloat16).newbyteorder()), r"step\.a\.1: .* type ndarray"),
        (np.zeros(2, np.dtypes.StringDType()), r"step\.a\.1: .* type ndarray"),
        (torch.zeros(2, dtype=torch.complex128), r"step\.a\.1: .*view_as_real"),
        (torch.zeros(2).to_sparse(), r"step\.a\.1: .*to_dense"),
        (CYCLE, "contains itself"),
    ],
)
def test_what_no_file_holds(folder: Path, value: Any, text: str) -> None:
    write_commit(folder, {"step": 3})
    with pytest.raises(TypeError, match=text):
        write_commit(folder, {"step": {"a": [1, value]}})
    assert read_commit(folder, {}) == {"step": 3}, "the one before is whole"


def test_a_named_tuple_needs_its_class(folder: Path) -> None:
    write_commit(folder, {"point": Point(1, 2)})
    for like in ({}, {"point": (1, 2)}, {"point": namedtuple("Point", "x y z")(1, 2, 3)}):
        with pytest.raises(fd.CheckpointError, match="a named tuple Point"):
            read_commit(folder, like)


def test_nothing_there(folder: Path) -> None:
    assert read_commit(folder, {}) is None
    folder.mkdir(parents=True, mode=0o700)
    assert read_commit(folder, {}) is None


# ---- whose it is


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another": (owned_by_another, "belongs to user 65534"),
    "of the group": (lambda path: path.chmod(path.stat().st_mode | stat.S_IWGRP), "chmod go-w"),
    "of all": (lambda path: path.chmod(path.stat().st_mode | stat.S_IWOTH), "chmod go-w"),
    "a link": (linked, "symbolic link"),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("which", ["kept", "call-1", FILE])
def test_what_others_may_write_to(folder: Path, which: str, how: str) -> None:
    """It is refused by the reader; a folder by the writer too, who replaces files."""
    write_commit(folder, {"step": 3})
    change, text = REFUSED[how]
    path = {"kept": folder.parent, "call-1": folder, FILE: folder / FILE}[which]
    change(path)
    with pytest.raises(fd.CheckpointError, match=f"{path}, which .*{text}"):
        read_commit(folder, {})
    if which != FILE:
        with pytest.raises(fd.CheckpointError, match=f"{path}, which .*{text}"):
            write_commit(folder, {"step": 4})
    else:
        write_commit(folder, {"step": 4})
        assert read_commit(folder, {}) == {"step": 4}


def test_a_sticky_folder_is_no_danger(folder: Path) -> None:
    """As /tmp: others may add to it, and replace nothing."""
    folder.parent.mkdir()
    folder.parent.chmod(0o1777)
    write_commit(folder, {"step": 3})
    assert read_commit(folder, {}) == {"step": 3}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600


def test_a_sticky_file_is_one(folder: Path) -> None:
    write_commit(folder, {"step": 3})
    (folder / FILE).chmod(0o1666)
    with pytest.raises(fd.CheckpointError, match="chmod go-w"):
        read_commit(folder, {})


def test_a_link_where_the_new_file_is_written(folder: Path, tmp_path: Path) -> None:
    """It goes; what it leads to stays as it is."""
    write_commit(folder, {"step": 3})
    victim = tmp_path / "victim"
    victim.write_text("kept")
    link = folder / "commit.new.1"
    link.symlink_to(victim)
    os.utime(link, (1, 1), follow_symlinks=False)  # abandoned long ago
    write_commit(folder, {"step": 4})
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert victim.read_text() == "kept"
    assert read_commit(folder, {}) == {"step": 4}


def test_nobody_publishes_the_unfinished_file_of_another_writer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a rank that was cut off still writes: the one that ends last wins."""
    begun, go_on, create, sync = threading.Event(), threading.Event(), os.fdopen, os.fsync

    def write() -> None:
        commits.Writer(folder).write(Saved({"x": 2}), Commit(2, 1))

    other = threading.Thread(target=write)

    def sync_late(descriptor: int) -> None:
        if other.ident is None:
            other.start()
            assert begun.wait(60)
        sync(descriptor)

    def create_and_wait(*arguments: Any) -> Any:
        file = create(*arguments)
        if threading.current_thread() is other:
            begun.set()
            assert go_on.wait(60)
        return file

    monkeypatch.setattr(os, "fdopen", create_and_wait)
    monkeypatch.setattr(os, "fsync", sync_late)
    commits.Writer(folder).write(Saved({"x": 1}), Commit(1, 1))
    assert read_commit(folder, {}) == {"x": 1}
    go_on.set()
    other.join()
    assert read_commit(folder, {}) == {"x": 2}
    assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.parametrize("elastic", [False, True])
def test_a_newer_commit_that_comes_during_a_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """It is written next. In an elastic job another rank may write it: it stays then."""
    begun, go_on, sync = threading.Event(), threading.Event(), os.fsync

    def hold(descriptor: int) -> None:
        if threading.current_thread().name == "farandole.commit":
            begun.set()
            assert go_on.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", hold)
    folder.parent.mkdir(mode=0o700)
    writer = commits.Writer(folder, make=not elastic)
    writer.begin(Saved({"x": 1}), Commit(1, 9))
    assert begun.wait(60)
    if elastic:
        commits.Writer(folder, make=False).write(Saved({"x": 2}), Commit(2, 3))
    else:
        writer.begin(Saved({"x": 2}), Commit(2, 3))
    go_on.set()
    writer.join()
    assert read_commit(folder, {}) == {"x": 2}
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / FILE, 0o600)
    with pytest.raises(fd.CheckpointError, match="neither a file nor a folder"):
        read_commit(folder, {})


# ---- what is in it


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/reading-ran-code",)


@pytest.fixture
def no_code() -> Iterator[None]:
    yield
    assert not Path("/tmp/reading-ran-code").exists()


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("name", ["elastic.pickle", FILE])
def test_a_pickle_is_not_read(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / name).write_bytes(pickle.dumps(Evil()))
    text = "was pickled by an old farandole" if name != FILE else "damaged"
    with pytest.raises(fd.CheckpointError, match=text):
        read_commit(folder, {})


def made(header: Any, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def told(document: Any) -> dict[str, str]:
    """Metadata that fit: whoever writes a file may write checksums too."""
    text = document if isinstance(document, str) else json.dumps(document)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"farandole": text, "farandole.sha256": digest}


def shared(tree: Any, dtype: str = "U8", shape: Any = (8,), places: Any = (0, 8)) -> bytes:
    digest = hashlib.sha256(f"torch.uint8 {tuple(shape)}".encode() + b"12345678").hexdigest()
    document = {"format": 1, "shared": {"x": tree}, "states": {}, "digests": {"t": digest}}
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": places}
    return made({"__metadata__": told(document), "t": tensor}, b"12345678")


def array(dtype: str, shape: Any = (1,)) -> dict[str, Any]:
    return {"$": "array", "dtype": dtype, "shape": shape, "name": "t"}


MALFORMED = {
    "empty": b"",
    "short": b"\x10\0\0",
    "header of 2**63": (2**63).to_bytes(8, "little") + b"{}",
    "header of 1 GB": (10**9).to_bytes(8, "little") + b"{}",
    "no JSON": made(b"{oh no"),
    "no text": made(b"\xff\xfe{}"),
    "deep": made(b"[" * 100_000 + b"]" * 100_000),
    "deep document": made({"__metadata__": told("[" * 100_000 + "]" * 100_000)}),
    "a list": made([1, 2]),
    "no metadata": made({}),
    "no document": made({"__metadata__": told([])}),
    "another checksum": made({"__metadata__": {**told({}), "farandole": "[]"}}),
    "a newer format": made({"__metadata__": told({"format": 9})}),
    "shape of 2**62": shared(1, shape=(2**31, 2**31), places=(0, 8)),
    "shape less than 0": shared(1, shape=(-2, -4)),
    "behind the end": shared(1, places=(0, 2**40)),
    "before the begin": shared(1, places=(-8, 0)),
    "backwards": shared(1, places=(8, 0)),
    "unknown dtype": shared(1, dtype="OBJECT"),
    "array of objects": shared(array("O")),
    "array of structures": shared(array("i4,O")),
    "array of another size": shared(array("<f8", (2, 2**40))),
    "unknown kind": shared({"$": "code", "name": "t"}),
    "kind that is a list": shared({"$": ["tuple"]}),
    "unknown name": shared({"$": "bytes", "name": "u"}),
    "keys that are lists": shared({"$": "dict", "pairs": [[[1], 2]]}),
    "set of lists": shared({"$": "set", "members": [[]]}),
    "number of 10000 digits": made({"__metadata__": told('{"format": ' + "1" * 10_000 + "}")}),
}


@pytest.mark.parametrize("how", MALFORMED)
def test_malformed_files(folder: Path, how: str) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / FILE).write_bytes(MALFORMED[how])
    with pytest.raises(fd.CheckpointError, match=r"call-1/commit\.safetensors is damaged"):
        read_commit(folder, {"x": Point(1, 2)})


def test_a_made_file_can_be_read(folder: Path) -> None:
    """So that the ones above are refused for what is wrong in them."""
    folder.mkdir(parents=True, mode=0o700)
    (folder / FILE).write_bytes(shared(array("S8")))
    assert read_commit(folder, {}) == {"x": np.array([b"12345678"])}


def test_every_flipped_byte_is_noticed(folder: Path) -> None:
    """Or changes nothing, as one in the header's spaces."""
    write_commit(folder, VALUES)
    data = (folder / FILE).read_bytes()
    draw = random.Random(3)
    for place in draw.sample(range(len(data)), 300):
        flipped = bytes([data[place] ^ 1 << draw.randrange(8)])
        (folder / FILE).write_bytes(data[:place] + flipped + data[place + 1 :])
        try:
            found = read_commit(folder, VALUES)
        except fd.CheckpointError:
            continue
        assert found is not None
        assert all(same(found[name], value) for name, value in VALUES.items()), place


def test_every_cut_is_noticed(folder: Path) -> None:
    write_commit(folder, VALUES)
    data = (folder / FILE).read_bytes()
    for length in random.Random(3).sample(range(len(data)), 300):
        (folder / FILE).write_bytes(data[:length])
        with pytest.raises(fd.CheckpointError):
            read_commit(folder, VALUES)


def test_a_disk_that_is_full(folder: Path) -> None:
    write_commit(folder, {"x": 3})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_commit(folder, {"x": np.arange(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert read_commit(folder, {}) == {"x": 3}


# ---- a disk that fails


def test_a_folder_that_is_away_for_a_moment(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Later commits go there when it is back; none makes another one in its place."""
    writer = commits.Writer(folder)
    writer.write(Saved({"x": 1}), Commit(1, 1))
    away = folder.parent.with_name("away")
    folder.parent.rename(away)
    writer.begin(Saved({"x": 2}), Commit(1, 2))
    told = ""
    while "not saved" not in told:
        told += capfd.readouterr().err
    writer.begin(Saved({"x": 3}), Commit(1, 3))
    away.rename(folder.parent)
    writer.join()
    told += capfd.readouterr().err
    assert read_commit(folder, {}) == {"x": 3}, "the newest one that was asked for"
    assert commits.newest_commit(folder.parent) == (1, 3)
    lines = told.splitlines()
    assert len(lines) == 2, told
    assert "commit 2 is not saved on the disk yet: " in lines[0]
    assert "No such file or directory" in lines[0]
    assert "newest saved commit: 1" in lines[0]
    assert "commit 3 is saved: the disk works again" in lines[1]


def test_a_disk_that_stays_full(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once; every commit is tried, and the last one for some time."""
    monkeypatch.setattr(commits, "_PATIENCE", 0.2)
    writer = commits.Writer(folder)
    writer.write(Saved({"x": 1}), Commit(1, 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    big = Saved({"x": np.arange(1000)})
    try:
        writer.begin(big, Commit(1, 2))
        writer.join()
        for number in (3, 4):
            with pytest.raises(commits.NotSaved, match=r"no commit was written to .*too large"):
                writer.write(big, Commit(1, number), last=number == 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    told = capfd.readouterr().err
    assert told.count("\n") == 1, told
    assert read_commit(folder, {}) == {"x": 1}
    writer.write(big, Commit(1, 5))
    assert commits.newest_commit(folder.parent) == (1, 5)
    assert "commit 5 is saved: the disk works again" in capfd.readouterr().err


def test_a_path_that_can_be_no_folder(tmp_path: Path) -> None:
    """No time heals that: it is an error at once."""
    (tmp_path / "file").write_text("")
    with pytest.raises(fd.CheckpointError, match=r"Not a directory.*remedy: pass a folder"):
        commits.Writer(tmp_path / "file" / "kept" / "call-1").write(Saved({"x": 1}), Commit(1, 1))


def test_a_commit_that_is_asked_for_as_the_thread_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread lives, but has made its last attempt: it was taken for one that goes on."""
    made, go_on = threading.Event(), threading.Event()

    class Thread(threading.Thread):
        def run(self) -> None:
            super().run()
            made.set()
            assert go_on.wait(60)

        def join(self, timeout: float | None = None) -> None:
            go_on.set()
            super().join(timeout)

    monkeypatch.setattr(threading, "Thread", Thread)
    writer = commits.Writer(folder)
    writer.begin(Saved({"x": 1}), Commit(1, 1))
    assert made.wait(60)
    writer.begin(Saved({"x": 2}), Commit(1, 2))
    writer.join()
    assert read_commit(folder, {}) == {"x": 2}


def test_a_commit_that_is_asked_for_during_the_last_attempt(tmp_path: Path) -> None:
    """The writer gives up the older commit, and makes an attempt for the newer one."""
    times, written = iter((0.0, 1e9, 1e9)), []

    def store(folder: Path, saved: Saved, commit: Commit, *others: object) -> None:
        if commit.number == 1:
            assert not writer.ask(saved, Commit(1, 2), last=True)
            raise OSError(errno.ENOSPC, "full")
        written.append(commit)

    writer = commits.Writer(tmp_path, store=store, clock=lambda: next(times), say=str)
    assert writer.ask(Saved({}), Commit(1, 1), last=True)
    assert [writer.attempt(), writer.attempt(), writer.attempt()] == [0.0, 0.0, None]
    assert written == [(1, 2)]


def test_a_reader_waits_for_a_disk_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_commit(folder, {"x": 1})
    read, failures = commits._parsed, [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "I/O")]

    def fails(file: Any) -> Any:
        if failures:
            raise failures.pop()
        return read(file)

    monkeypatch.setattr(commits, "_parsed", fails)
    assert read_commit(folder, {}) == {"x": 1}
    assert not failures


def test_the_number_of_a_big_commit_needs_its_header_only(folder: Path) -> None:
    write_commit(folder, {"x": np.zeros(3, np.uint8)})
    file = folder / FILE
    header = json.loads(file.read_bytes()[8:].decode(errors="replace").rsplit("}", 1)[0] + "}")
    (name,) = set(header) - {"__metadata__"}
    size = 3_000_000_000
    header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    file.write_bytes(made(header))
    os.truncate(file, file.stat().st_size + size)
    code = f"""
import resource, sys, pathlib
from farandole.commits import newest_commit
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
assert newest_commit(pathlib.Path({str(folder.parent)!r})) == (0, 0)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 500_000
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_whose_folder_is_gone_has_not_begun_anew(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        commits.newest_commit(folder.parent)
    folder.mkdir(parents=True)
    assert commits.newest_commit(folder.parent) == (0, 0)
