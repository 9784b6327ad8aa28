# SPDX-License-Identifier: Apache-2.0
"""Stores commits of elastic training on the disk. A commit is one safetensors file in a folder that
only this user may write to. The file is replaced atomically and checked when it is read. Used by
rank 0.

The file's header has a JSON document with the tree of all values and all tensors' checksums.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farandole import trees
from farandole.errors import CheckpointError
from farandole.membership.messages import NOTHING, Commit
from farandole.trees import CODES, DTYPES, METADATA, Blocks, Flat, TensorBlock
from farandole.trust import (
    Folder,
    is_trusted_user,
    make_folder,
    open_file,
    opened,
    replace_file,
)

FORMAT = 1  # version of the JSON document
DOCUMENT, CHECKSUM = "farandole", "farandole.sha256"
FILE = "commit.safetensors"
_ABANDONED = 600.0  # age in seconds after which no process is still writing a file
_NEW = "commit.new"  # prefix of unfinished files' names; a killed job may leave such a file
_PICKLED = "elastic.pickle"  # file name that an unreleased version of farandole used
_LONGEST_HEADER = 100_000_000  # bytes; the limit that safetensors sets
_LENGTH = struct.Struct("<Q")  # the header's length is at the start of the file
# Seconds until the first retry and for all retries. The wait doubles with every retry.
_FIRST_WAIT, _PATIENCE = 0.05, 5.0
_DAMAGE = (KeyError, TypeError, ValueError, IndexError, struct.error)
_LASTING = (  # errors that no retry can fix
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)


def digest(dtype: str, shape: tuple[int, ...], flat: Flat) -> str:
    """Returns the SHA-256 of a tensor's dtype, shape and elements."""
    hasher = hashlib.sha256(f"torch.{dtype} {shape}".encode())
    hasher.update(flat.data)
    return hasher.hexdigest()


def metadata_of(document: dict[str, Any]) -> dict[str, str]:
    """Returns a file's metadata, which consists of the document and its checksum."""
    text = json.dumps({"format": FORMAT, **document})
    return {DOCUMENT: text, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def document_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Returns the document. Raises ValueError if the document was changed or has a newer format."""
    text = metadata[DOCUMENT]
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(CHECKSUM):
        raise ValueError("its JSON document does not match its checksum")
    document: dict[str, Any] = json.loads(text)
    if document["format"] != FORMAT:
        raise ValueError("a newer farandole wrote it: update farandole here")
    return document


def check_digests(digests: dict[str, str], document: dict[str, Any]) -> None:
    """Raises ValueError if a tensor differs from the one that was written."""
    if digests != document["digests"]:
        changed = {name for name, _ in digests.items() ^ document["digests"].items()}
        raise ValueError(f"tensor {min(changed)} does not match its checksum")


# ---- a commit


class Part(NamedTuple):
    """An object that has a state, together with a copy of that state."""

    value: Any
    state: Any


class Saved(NamedTuple):
    """A copy of values. Objects that have a state are not copied; `parts` has copies of the
    states."""

    values: dict[str, Any]
    parts: dict[str, Part] = {}  # noqa: RUF012  # never changed

    def objects(self) -> dict[str, Any]:
        """Returns the objects that have a state, by path."""
        return {path: part.value for path, part in self.parts.items()}


def write_commit(
    folder: Path,
    saved: Saved,
    commit: Commit = NOTHING,
    make: bool = True,
    above: Folder | None = None,
    ordered: bool = False,
) -> None:
    """Replaces the commit in `folder` atomically. If `make`, also makes the folder above it. If
    `ordered` and the folder already has a newer commit, keeps that one, because its writer came
    later and was faster.

    Raises CheckpointError if another user may write to the folder and OSError if the disk fails.
    Raises TypeError, with the value's name, for a value that the file can't hold without pickling.
    """
    blocks = Blocks(saved.objects())
    try:
        shared = {name: trees.encode(x, name, blocks) for name, x in saved.values.items()}
        states = {x: trees.encode(part.state, x, blocks) for x, part in saved.parts.items()}
        document = {"shared": shared, "states": states, "commit": list(commit)}
        document["digests"] = {name: digest(*block) for name, block in blocks.found.items()}
        metadata = metadata_of(document)
    except RecursionError:
        raise TypeError("the state contains itself, or is nested too deeply for a file") from None
    header = _header(metadata, blocks.found)
    if make:
        make_folder(folder.parent)
    with _opened(folder, True, above) as place:
        for left in os.listdir(place):  # noqa: PTH208  # a descriptor has no path
            # Younger files are kept, because other processes may still be writing them.
            with contextlib.suppress(FileNotFoundError):
                age = time.time() - os.stat(left, dir_fd=place, follow_symlinks=False).st_mtime
                if left.startswith(_NEW) and age > _ABANDONED:
                    os.unlink(left, dir_fd=place)
        data = (block.flat.data for block in blocks.found.values())
        new = f"{_NEW}.{secrets.token_hex(8)}"

        def outdated() -> bool:
            return ordered and _commit_in(place, folder) > commit

        parts: list[bytes | memoryview] = [_LENGTH.pack(len(header)), header, *data]
        replace_file(place, FILE, new, parts, outdated=outdated)


def _commit_in(place: int, folder: Path) -> Commit:
    """Returns the commit in an open folder, or NOTHING if there is no readable one."""
    try:
        with open_file(place, FILE, folder / FILE) as file:
            return _number_of(file)
    except (OSError, CheckpointError, *_DAMAGE):
        return NOTHING


def _print(text: str) -> None:
    os.write(2, text.encode(errors="replace"))


class NotSaved(CheckpointError):
    """A commit could not be written because of a disk failure."""


class Writer:
    """Writes commits to one folder, at once or on a background thread. Only one thread may use it.

    If the disk fails, retries for _PATIENCE. Prints one line when the disk fails and one when it
    works again. In between, commits are kept only in memory.
    """

    def __init__(
        self,
        folder: Path,
        make: bool = True,
        store: Callable[..., None] = write_commit,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _print,
    ) -> None:
        """If `make`, also makes the folder above `folder`. Without `make`, as under `farandole run
        --elastic`, a commit never replaces a newer one on the disk. Simulations pass their own
        functions for the disk (`store`), the time (`clock`) and the messages (`say`)."""
        self._folder = folder
        self._above = Folder(folder.parent)
        self._make, self._ordered = make, not make
        self._store, self._clock, self._say = store, clock, say
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._newest: Commit | None = None  # the newest commit on the disk
        self._fails = False  # True if a failure has been printed
        self._patience = self._wait = self._until = 0.0  # _wait: seconds until the next attempt
        self._lock = threading.Lock()  # guards _asked and _busy
        self._asked: tuple[Saved, Commit]  # the newest commit to write
        self._busy = False  # True if another attempt will follow and read _asked

    def write(self, saved: Saved, commit: Commit, last: bool = False) -> None:
        """Writes this commit unless it is on the disk. `last` is True if no later commit will
        follow.

        Raises NotSaved if the disk still fails after _PATIENCE. If the disk had failed before and
        `last` is False, raises NotSaved after a single attempt. Also raises the errors of
        write_commit().
        """
        try:
            self.ask(saved, commit, last)
            self._write()
        finally:  # also after a KeyboardInterrupt
            self._busy = False

    def ask(self, saved: Saved, commit: Commit, last: bool) -> bool:
        """Makes this commit the next one to write. Returns False if attempts are under way, because
        they will also write this commit. Otherwise the caller must repeat attempt(). `last` means
        the same as in write()."""
        with self._lock:
            self._asked = saved, commit
            if self._busy:
                return False
            self._busy = True
        self._patience = 0.0 if self._fails and not last else _PATIENCE
        self._renew()
        return True

    def attempt(self) -> float | None:
        """Tries once to write the newest commit that was asked for. Returns the seconds until the
        next attempt, or None if that commit is on the disk. Raises the errors of write(). After an
        error there is no next attempt."""
        with self._lock:
            saved, commit = self._asked
            if commit == self._newest:
                self._busy = False
                return None
        try:
            return self._attempt(saved, commit)
        except Exception as error:
            with self._lock:
                if isinstance(error, NotSaved) and self._asked[1] != commit:
                    return 0.0  # meanwhile, a newer commit was asked for
                self._busy = False
            raise

    def _attempt(self, saved: Saved, commit: Commit) -> float:
        try:
            self._store(self._folder, saved, commit, self._make, self._above, self._ordered)
        except OSError as reason:
            self._tell(commit, reason)
            if self._clock() + self._wait > self._until:
                raise NotSaved(f"no commit was written to {self._folder}: {reason}") from reason
            pause, self._wait = self._wait, 2 * self._wait
            return pause
        self._tell(commit)
        self._newest, self._make = commit, False  # do not make a moved folder again
        self._renew()
        return 0.0

    def _renew(self) -> None:
        self._wait, self._until = _FIRST_WAIT, self._clock() + self._patience

    def _write(self) -> None:
        while (pause := self.attempt()) is not None:
            time.sleep(pause)

    def _tell(self, commit: Commit, reason: OSError | None = None) -> None:
        """Prints that the disk fails or works again. If no commit has been written yet, raises
        CheckpointError for an error that no retry can fix."""
        if reason is not None and self._newest is None and reason.errno in _LASTING:
            raise CheckpointError(
                f"no commit can be written to {self._folder}: {reason}; remedy: pass a folder that "
                "you can write to"
            ) from reason
        if self._fails == (reason is not None):
            return
        self._fails = reason is not None
        text = f"farandole: commit {commit.number} is "
        if reason is None:
            text += f"saved: the disk works again ({self._folder})\n"
        else:
            kept = "none" if self._newest is None else str(self._newest.number)
            text += (
                f"not saved on the disk yet: {reason}; farandole tries again; newest saved commit: "
                f"{kept} ({self._folder})\n"
            )
        self._say(text)

    def begin(self, saved: Saved, commit: Commit) -> None:
        """Starts to write `saved` in the background. From now on, `saved` must not change. If a
        write is under way, `saved` is written next. If no thread can be started, writes `saved`
        before it returns. Raises the error of the last write."""
        try:
            if not self.ask(saved, commit, last=True):
                return
            self.join()  # a previous thread has made its last attempt
            self._thread = threading.Thread(target=self._work, name="farandole.commit")
            try:
                self._thread.start()
            except RuntimeError:  # no thread is left
                self._thread = None
                self._work()
        except BaseException:
            self._busy = False
            raise

    def _work(self) -> None:
        try:
            self._write()
        except NotSaved:
            pass  # already printed; the next commit will try again
        except Exception as reason:
            self._error = reason

    def join(self) -> None:
        """Waits for the background write. If it failed, raises its error once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def read_commit(folder: Path, like: Saved) -> Saved | None:
    """Reads the commit in `folder`. Returns None if there is none. `like` is the program's present
    copy. It provides the classes of values and the objects that have a state.

    Raises CheckpointError if another user owns or may write to the folder or the file, if the file
    is damaged, pickled or written by another program, or if it can't be read within _PATIENCE.
    """
    path = folder / FILE
    wait, until = _FIRST_WAIT, time.monotonic() + _PATIENCE
    while True:
        try:
            with _opened_file(folder) as file:
                document, found = _parsed(file)
            return _decoded(document, Blocks(like.objects(), found), like)
        except FileNotFoundError:
            return None
        except CheckpointError:
            raise
        except OSError as reason:
            if time.monotonic() + wait > until:
                raise CheckpointError(f"the commit {path} can't be read: {reason}") from reason
        except (Exception, RecursionError) as reason:  # damage may raise errors of many classes
            text = f"{type(reason).__name__}: {reason}"
            raise CheckpointError(
                f"the commit {path} is damaged, or another program wrote it ({text}); remedy: "
                "start again in a different folder"
            ) from reason
        time.sleep(wait)
        wait *= 2


def _decoded(document: dict[str, Any], blocks: Blocks, like: Saved) -> Saved:
    values, parts = like.values, {}
    for path, tree in document["states"].items():
        if path not in like.parts:
            raise TypeError(
                f"it holds the state of an object at {path}, where the program has none"
            )
        value, state = like.parts[path]
        parts[path] = Part(value, trees.decode(tree, blocks, state))
    trees_of = document["shared"].items()
    return Saved({x: trees.decode(tree, blocks, values.get(x)) for x, tree in trees_of}, parts)


def newest_commit(folder: Path) -> Commit:
    """Returns the newest commit among all calls in a job's folder, or NOTHING if there is none.
    Reads only headers. Raises OSError, and CheckpointError in the same cases as read_commit()."""
    found = NOTHING
    for each in folder.iterdir():
        if not (each.name.startswith("call-") and is_trusted_user(each.lstat().st_uid)):
            continue  # another user may have made it in a sticky folder
        try:
            with _opened_file(each) as file:
                found = max(found, _number_of(file))
        except FileNotFoundError:
            continue
        except _DAMAGE as reason:
            raise CheckpointError(f"the commit {each / FILE} is damaged: {reason}") from reason
    return found


def _number_of(file: io.BufferedReader) -> Commit:
    header, _ = _header_of(file)
    number = document_of(header[METADATA]).get("commit", [0, 1])
    return Commit(int(number[0]), int(number[1]))


def _header(metadata: dict[str, str], found: dict[str, TensorBlock]) -> bytes:
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


def _parsed(file: io.BufferedReader) -> tuple[dict[str, Any], dict[str, TensorBlock]]:
    """Returns a file's document and tensors. Raises ValueError, OSError or other built-in
    errors."""
    header, begin = _header_of(file)
    end = os.fstat(file.fileno()).st_size
    document = document_of(header.pop(METADATA))
    found = {}
    for name, entry in header.items():
        dtype, size = DTYPES[entry["dtype"]]
        shape = tuple(int(n) for n in entry["shape"])
        first, last = (begin + int(n) for n in entry["data_offsets"])
        if min(shape, default=0) < 0 or not begin <= first <= last <= end:
            raise ValueError(f"tensor {name} lies outside the file")
        if prod(shape) * size != last - first:
            raise ValueError(f"the size of tensor {name} does not match its shape {shape}")
        flat = np.empty(last - first, np.uint8)
        file.seek(first)
        if file.readinto(flat.data) != flat.size:
            raise ValueError(f"tensor {name} is incomplete")
        found[name] = TensorBlock(dtype, shape, flat)
    check_digests({name: digest(*block) for name, block in found.items()}, document)
    return document, found


def _header_of(file: io.BufferedReader) -> tuple[dict[str, Any], int]:
    """Reads only the header. Returns the header and the offset of the tensors. Raises ValueError,
    OSError and other built-in errors."""
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    begin, size = _LENGTH.size + length, os.fstat(file.fileno()).st_size
    if length > _LONGEST_HEADER or begin > size:
        raise ValueError(f"its header claims {length} bytes, but the file has {size}")
    return json.loads(file.read(length)), begin


# ---- the folders


@contextlib.contextmanager
def _opened(folder: Path, make: bool, above: Folder | None = None) -> Iterator[int]:
    """Context manager that opens the folder of one call's commits, which is in the job's folder
    `above`, and yields a descriptor.

    Raises FileNotFoundError, and CheckpointError if another user may write to either folder.
    """
    with (above or Folder(folder.parent)).opened() as outer:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder.name, 0o700, dir_fd=outer)
        with opened(folder, outer) as inner:
            yield inner


@contextlib.contextmanager
def _opened_file(folder: Path) -> Iterator[io.BufferedReader]:
    """Context manager that opens the commit's file in `folder`. Raises FileNotFoundError if there
    is none, and CheckpointError if there is a pickle instead."""
    path = folder / FILE
    with _opened(folder, make=False) as place:
        try:
            file = open_file(place, FILE, path)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                os.stat(_PICKLED, dir_fd=place, follow_symlinks=False)
                raise CheckpointError(
                    f"{path.with_name(_PICKLED)} was pickled by an old farandole and is not read, "
                    "because unpickling can run code; remedy: start again in a different folder"
                ) from None
            raise
        with file:
            yield file
