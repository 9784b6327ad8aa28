# SPDX-License-Identifier: Apache-2.0
"""Commits of elastic training on the disk: one safetensors file in a folder of the user's own,
written as a whole or not at all, and checked when read. For rank 0, on the thread that commits.

The header has a document of trees, in JSON, and the checksums of all tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from farandole import trees
from farandole.errors import CheckpointError
from farandole.membership.words import NOTHING, Commit
from farandole.trees import CODES, DTYPES, METADATA, Block, Blocks, Flat

FORMAT = 1  # of the document
DOCUMENT, CHECKSUM = "farandole", "farandole.sha256"
FILE = "commit.safetensors"
_NEW = "commit.new"  # what a killed job leaves is there
_PICKLED = "elastic.pickle"  # of farandole before it was released
_LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
_LENGTH = struct.Struct("<Q")  # of the header, at the beginning of the file
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def digest(dtype: str, shape: tuple[int, ...], flat: Flat) -> str:
    """SHA-256 of a tensor's dtype, shape and elements."""
    hasher = hashlib.sha256(f"torch.{dtype} {shape}".encode())
    hasher.update(flat.data)
    return hasher.hexdigest()


def metadata_of(document: dict[str, Any]) -> dict[str, str]:
    """What describes a file: the document and its checksum."""
    text = json.dumps({"format": FORMAT, **document})
    return {DOCUMENT: text, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def document_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The document. Raises ValueError for one that has changed, or is of a newer format."""
    text = metadata[DOCUMENT]
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(CHECKSUM):
        raise ValueError("its description has changed")
    document: dict[str, Any] = json.loads(text)
    if document["format"] != FORMAT:
        raise ValueError("a newer farandole wrote it: update farandole here")
    return document


def check_digests(digests: dict[str, str], document: dict[str, Any]) -> None:
    """Raises ValueError where a tensor is not the one that was written."""
    if digests != document["digests"]:
        changed = {name for name, _ in digests.items() ^ document["digests"].items()}
        raise ValueError(f"{min(changed)} has changed")


# ---- a commit


def write_commit(folder: Path, values: dict[str, Any], commit: Commit = NOTHING) -> None:
    """Replaces the folder's commit, whatever is killed when.

    Raises CheckpointError for a folder that another user may write to, and where the disk fails;
    TypeError, with its name, for a value that no file without code can hold.
    """
    blocks = Blocks()
    try:
        shared = {name: trees.encode(x, name, blocks) for name, x in values.items()}
        digests = {name: digest(*block) for name, block in blocks.found.items()}
        metadata = metadata_of({"shared": shared, "digests": digests, "commit": list(commit)})
    except RecursionError:
        raise TypeError("the state contains itself, or is nested too deeply for a file") from None
    header = _header(metadata, blocks.found)
    try:
        with _opened(folder, make=True) as place:
            data = (block.flat.data for block in blocks.found.values())
            replace_file(place, FILE, _NEW, [_LENGTH.pack(len(header)), header, *data])
    except OSError as reason:
        raise CheckpointError(f"no commit was written to {folder}: {reason}") from reason


class Writer:
    """Writes commits to one folder, in the background if told to; a thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._newest: Commit | None = None  # that is on the disk

    def write(self, values: dict[str, Any], commit: Commit) -> None:
        """Calls write_commit(), unless this commit is on the disk already."""
        if commit != self._newest:
            write_commit(self._folder, values, commit)
            self._newest = commit

    def begin(self, values: dict[str, Any], commit: Commit) -> None:
        """Begins to write `values`, which must not change any more. Raises the error of the one
        before; where that is not written yet, it goes on instead."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.join()

        def work() -> None:
            try:
                self.write(values, commit)
            except Exception as reason:
                self._error = reason

        self._thread = threading.Thread(target=work, name="farandole.commit")
        self._thread.start()

    def join(self) -> None:
        """Waits for the write that was started. Raises its error once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def read_commit(folder: Path, like: dict[str, Any]) -> dict[str, Any] | None:
    """The folder's commit; None: there is none. `like`: the values whose place it takes.

    Raises CheckpointError for a folder or file that another user owns or may write to, and for a
    file that is damaged, foreign or pickled.
    """
    path = folder / FILE
    try:
        with _opened(folder, make=False) as place:
            data = _bytes_of(place, path)
        document, blocks = _parsed(data)
        shared = document["shared"]
        return {x: trees.decode(tree, Blocks(blocks), like.get(x)) for x, tree in shared.items()}
    except FileNotFoundError:
        return None
    except CheckpointError:
        raise
    except OSError as reason:
        raise CheckpointError(f"the commit {path} can't be read: {reason}") from reason
    except (Exception, RecursionError) as reason:  # of many classes, by what is wrong
        text = f"{type(reason).__name__}: {reason}"
        raise CheckpointError(
            f"the commit {path} is damaged, or not of this program ({text}); remedy: start "
            "again in a different folder"
        ) from reason


def newest_commit(folder: Path) -> Commit:
    """Which one the files of a job's calls hold: the greatest; NOTHING: there is none. Raises
    CheckpointError as read_commit() does, but checks no tensor."""
    found = NOTHING
    for each in folder.glob("call-*"):
        try:
            with _opened(each, make=False) as place:
                header, _ = _header_of(_bytes_of(place, each / FILE))
            told = document_of(header[METADATA]).get("commit", [0, 1])
            found = max(found, Commit(int(told[0]), int(told[1])))
        except FileNotFoundError:
            continue
        except (KeyError, TypeError, ValueError, IndexError, struct.error) as reason:
            raise CheckpointError(f"the commit {each / FILE} is damaged: {reason}") from reason
    return found


def _header(metadata: dict[str, str], found: dict[str, Block]) -> bytes:
    header: dict[str, Any] = {METADATA: metadata}
    begin = 0
    for name, block in found.items():
        place = [begin, begin + block.flat.nbytes]
        header[name] = {
            "dtype": CODES[block.dtype],
            "shape": block.shape,
            "data_offsets": place,
        }
        begin = place[1]
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)


def _parsed(data: bytes) -> tuple[dict[str, Any], dict[str, Block]]:
    """Document and tensors of a file. Raises ValueError, and errors of Python's own."""
    header, begin = _header_of(data)
    document = document_of(header.pop(METADATA))
    found = {}
    for name, told in header.items():
        dtype, size = DTYPES[told["dtype"]]
        shape = tuple(int(n) for n in told["shape"])
        first, last = (begin + int(n) for n in told["data_offsets"])
        if min(shape, default=0) < 0 or not begin <= first <= last <= len(data):
            raise ValueError(f"{name} is not in the file")
        if prod(shape) * size != last - first:
            raise ValueError(f"{name} does not have the bytes of its shape {shape}")
        flat = np.frombuffer(data, np.uint8, last - first, first).copy()  # to be written to
        found[name] = Block(dtype, shape, flat)
    check_digests({name: digest(*block) for name, block in found.items()}, document)
    return document, found


def _header_of(data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the tensors. Raises ValueError and Python's own errors."""
    (length,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    if length > _LONGEST_HEADER or begin > len(data):
        raise ValueError(f"its header has {length} bytes, the file {len(data)}")
    return json.loads(data[_LENGTH.size : begin]), begin


# ---- whose a folder or file is


@contextlib.contextmanager
def _opened(folder: Path, make: bool) -> Iterator[int]:
    """The descriptor of a folder for one call's commits, in the folder that the setting names.

    Raises CheckpointError for one that isn't the user's own alone, FileNotFoundError.
    """
    if make:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with opened(folder.parent) as outer:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder.name, 0o700, dir_fd=outer)
        with opened(folder, outer) as inner:
            yield inner


@contextlib.contextmanager
def opened(path: Path, within: int | None = None) -> Iterator[int]:
    """The descriptor of a folder that is this user's own alone, else CheckpointError. `within`: the
    descriptor of its parent; None: the whole path counts."""
    name = path if within is None else path.name
    found = os.stat(name, dir_fd=within, follow_symlinks=False)
    _check(path, found)  # first: an error that names the owner says more than one of open()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(name, flags, dir_fd=within)
    try:
        _check(path, os.fstat(number))
        yield number
    finally:
        os.close(number)


def replace_file(place: int, name: str, new: str, parts: Iterable[bytes | memoryview]) -> None:
    """Gives a file of the folder with the descriptor `place` other contents, whatever is killed
    when. `new`: its name until it is whole. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=place)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o600, dir_fd=place), "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, name, src_dir_fd=place, dst_dir_fd=place)
    os.fsync(place)  # else the new name may be lost with the machine


def _bytes_of(place: int, path: Path) -> bytes:
    """The file's contents. Raises FileNotFoundError where there is neither one nor a pickle."""
    try:
        _check(path, os.stat(FILE, dir_fd=place, follow_symlinks=False))
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            os.stat(_PICKLED, dir_fd=place, follow_symlinks=False)
            raise CheckpointError(
                f"{path.with_name(_PICKLED)} was pickled by an old farandole, and reading it could "
                "run code: it is not read; remedy: start again in a different folder"
            ) from None
        raise
    return read_file(place, FILE, path)


def read_file(place: int, name: str, path: Path | None = None) -> bytes:
    """A file of the folder with the descriptor `place`; errors name `path`. Raises CheckpointError
    for one that another user may write to, OSError."""
    # Not waiting for somebody to write, if it is a pipe by now.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=place), "rb") as file:
        _check(path or Path(name), os.fstat(file.fileno()))
        return file.read()


def _check(path: Path, found: os.stat_result) -> None:
    """Raises CheckpointError for what another user owns or may write to, and for links."""
    if stat.S_ISLNK(found.st_mode):
        what = "is a symbolic link; remedy: give the path that it leads to"
    elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        what = "is neither a file nor a folder; remedy: choose a different folder for commits"
    elif found.st_uid not in (os.geteuid(), 0):
        what = f"belongs to user {found.st_uid}; remedy: choose a folder that you own for commits"
    elif found.st_mode & _OTHERS and not _sticky(found.st_mode):
        what = (
            f"can be written to by other users (mode {stat.S_IMODE(found.st_mode):o}); remedy: "
            f"look at what is there, then chmod go-w {path}"
        )
    else:
        return
    raise CheckpointError(f"elastic training does not trust {path}, which {what}")


def _sticky(mode: int) -> bool:
    """Whether others may add to a folder, but not replace what is there."""
    return stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)
