# SPDX-License-Identifier: Apache-2.0
"""Which users, folders and files this process trusts. The core has the rule for users; any thread.

A file is trusted by the descriptor of its folder, and a folder by the descriptors of all folders
above it: a path that was checked may lead elsewhere a moment later.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from farandole._library import lib
from farandole.errors import CheckpointError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SHARED = stat.S_IWGRP | stat.S_ISGID  # a folder in which a group works has either of them
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # it waits for no pipe's writer
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/null")
_PLACE = ".farandole-place"  # a link in a folder below one that a group shares
_MOST_LINKS = 40  # in one path, as the kernel has it
_EVERYBODY = 0xFFFFFFFF  # ids, if a namespace maps all of them
_ACL = struct.Struct("<HHI")  # of acl(5): what kind of entry, permissions, user or group
_ACL_USER, _ACL_GROUP, _ACL_WRITE = 2, 8, 2
Judge = Callable[[int, Path, os.stat_result, os.stat_result], bool]


def is_own_user(user: int) -> bool:
    """True for the user that this process runs as.

    False for the kernel's overflow user (nobody) in a user namespace that does not map every user:
    there it stands for all users that are not mapped.
    """
    return bool(lib.farandole_is_own_user(user))


@contextlib.contextmanager
def opened(path: Path, within: int) -> Iterator[int]:
    """The descriptor of a folder that is this user's own alone, in one that has been checked and
    has the descriptor `within`. Raises CheckpointError for one that is not, OSError."""
    with _closing(_opened(within, path.name or "/", path, _FOLDER)) as number:
        yield number


@contextlib.contextmanager
def out_of_reach() -> Iterator[None]:
    """A context in which the working folder is one that others can't write to, for libraries that
    read settings from there when they are loaded, such as UCX, which MPI loads, ucx.conf."""
    with contextlib.ExitStack() as stack:
        try:
            before = os.open(".", os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, before)
            found = os.fstat(before)
            reached = found.st_mode & _OTHERS or not is_trusted_user(found.st_uid)
        except OSError:  # nobody can be obeyed in a folder that can't be opened
            reached = False
        if reached:
            os.chdir("/")
            stack.callback(os.fchdir, before)
        yield


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, for this user alone. Raises OSError."""
    for each in (*reversed(path.absolute().parents), path):
        if not each.is_dir():
            with contextlib.suppress(FileExistsError):
                each.mkdir(0o700)


class Folder:
    """A folder of this user's own that stays the one it was when it was opened first: members of a
    group that shares a folder above it can't put another one of this user's in its place. Later
    processes know it by a link in it, which names its place below the shared folder."""

    def __init__(self, path: Path, new: bool = False) -> None:
        """`new`: it is empty when it is opened first, or has been exchanged already."""
        self.path, self._new = path, new
        self._held: int | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor. Raises CheckpointError if it is another one, or is not this user's own
        alone, or if others can exchange it; OSError."""
        parent = _parent(self.path, _check_above)
        with parent as (above, last, shared), opened(last, above) as number:
            if self._held is None:
                with os.scandir(number) as found:
                    if self._new and any(found):
                        raise _untrusted(self.path, "is not new: somebody has exchanged it")
                self._held = os.dup(number)
                weakref.finalize(self, os.close, self._held)
            elif not self._is(number):
                raise CheckpointError(
                    f"{self.path} is not the folder that it was before: somebody has exchanged it; "
                    "remedy: look who may write to the folders above it, and start again"
                )
            if shared:
                _check_place(last, number, shared)
            yield number

    def _is(self, number: int) -> bool:
        assert self._held is not None
        try:
            return os.path.sameopenfile(self._held, number)
        except OSError:  # a network's disk was away: it does not know what it has told
            return True

    def remove(self) -> None:
        """Removes all that was found in the folder when it was opened, wherever that is now, and
        the empty folder. Raises OSError."""
        for _, folders, files, at in os.fwalk(".", topdown=False, dir_fd=self._held):
            for name in files:
                os.unlink(name, dir_fd=at)
            for name in folders:
                os.rmdir(name, dir_fd=at)
        self.path.rmdir()


def _check_place(path: Path, number: int, shared: str) -> None:
    """Notes a folder's place in it, or raises CheckpointError if it has been at another one."""
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(shared, _PLACE, dir_fd=number)
        noted = os.readlink(_PLACE, dir_fd=number)
    except OSError:
        return  # nobody may write here, or this file system has no links
    if noted != shared:
        raise _untrusted(
            path,
            f"was {noted} before: somebody who may write to a folder above it has renamed it; "
            f"remedy: if that was you, remove {path / _PLACE}",
        )


def read_file(place: int, name: str) -> bytes:
    """A file of the folder with the descriptor `place`. Raises CheckpointError for one that another
    user may write to, OSError."""
    with open_file(place, name, Path(name)) as file:
        return file.read()


def open_file(place: int, name: str, path: Path) -> io.BufferedReader:
    """Opens such a file; errors name `path`."""
    return os.fdopen(_opened(place, name, path, _READ), "rb")


def _opened(place: int, name: str, path: Path, flags: int) -> int:
    """The descriptor of a file or folder in the folder with the descriptor `place`. Raises
    CheckpointError for one that another user may write to, and for a link, OSError."""
    with contextlib.suppress(FileNotFoundError):
        # First: an error that names the owner says more than one of open().
        check(path, os.stat(name, dir_fd=place, follow_symlinks=False))
    number = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=place)
    try:
        check(path, os.fstat(number))
    except BaseException:
        os.close(number)
        raise
    return number


@contextlib.contextmanager
def _closing(number: int) -> Iterator[int]:
    try:
        yield number
    finally:
        os.close(number)


def replace_file(
    place: int, name: str, new: str, parts: Iterable[bytes | memoryview], mode: int = 0o600
) -> None:
    """Gives a file of the folder with the descriptor `place` other contents, whatever is killed
    when. `new`: its name until it is whole. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=place)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, mode, dir_fd=place), "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, name, src_dir_fd=place, dst_dir_fd=place)
    os.fsync(place)  # else the new name may be lost with the machine


def open_lock(place: int, name: str) -> int:
    """The descriptor of a file for locks in the folder with the descriptor `place`. Raises
    CheckpointError for one that another user may lock, OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return _opened(place, name, Path(name), flags)


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file that the user has named. What is at that name is replaced, a link too; on the
    way no link is followed that another user can have put there.

    Raises CheckpointError for such a link, OSError.
    """
    if str(path) in _STREAMS:
        path.write_bytes(data)
        return
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    way = _parent(path, _check_way)
    with way as (parent, last, _), _closing(os.open(".", _FOLDER, dir_fd=parent)) as place:
        replace_file(place, last.name, f".{last.name}.{secrets.token_hex(8)}", [data], mode)


def read_secret(path: Path, most: int) -> bytes:
    """The first `most` bytes of a regular file that only this user may read or write, and that
    nobody else can exchange; links to it are followed.

    Raises CheckpointError for a folder above it that is not trusted, PermissionError, OSError.
    """
    path.stat()  # no folder need be trusted where no secret is
    with _parent(path, _check_above, follows=True) as (parent, last, _):
        descriptor = os.open(last.name, _READ | os.O_NOFOLLOW, dir_fd=parent)
    with _closing(descriptor):
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("it is not a regular file")
        if not is_own_user(found.st_uid):
            raise PermissionError(f"it belongs to user {found.st_uid}, not to this one")
        if found.st_mode & 0o077:
            raise PermissionError(f"others may use it too; remedy: chmod 600 {path}")
        return os.read(descriptor, most)


def read_text(path: Path, most: int, owners: set[int] | None = None) -> str:
    """The text of a regular file of at most `most` bytes, whoever owns it; never waits for a pipe's
    writer. `owners`: gets the file's owner; then no link is followed to it.

    Raises ValueError for any other kind of file and for a larger one, OSError.
    """
    descriptor = os.open(path, _READ | (0 if owners is None else os.O_NOFOLLOW))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if owners is not None:
            owners.add(found.st_uid)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_size > most:
            raise ValueError(f"{path} has {found.st_size} bytes; at most {most} are read")
        return file.read(most).decode(errors="replace")


# ---- the rules


def check(path: Path, found: os.stat_result) -> None:
    """Raises CheckpointError for what another user owns or may write to, and for links."""
    mode = found.st_mode
    if stat.S_ISLNK(mode):
        raise _untrusted(path, "is a symbolic link; remedy: give the path that it leads to")
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise _untrusted(path, "is neither a file nor a folder; remedy: choose a different folder")
    if not is_trusted_user(found.st_uid):
        raise _untrusted(
            path, f"belongs to user {found.st_uid}; remedy: choose a folder that you own"
        )
    if mode & _OTHERS and not _sticky(mode):
        raise _untrusted(
            path,
            f"can be written to by other users (mode {stat.S_IMODE(mode):o}); remedy: look at what "
            f"is there, then chmod go-w {path}",
        )


def _check_way(number: int, path: Path, found: os.stat_result, above: os.stat_result) -> bool:
    """Raises CheckpointError for a link that another user made, or can have renamed."""
    if stat.S_ISLNK(found.st_mode):
        user, mode = found.st_uid, above.st_mode
        if not (is_trusted_user(user) or _is_unknown(found, above)):
            raise _untrusted(
                path, f"is a link of user {user}; remedy: give the path that it leads to"
            )
        if mode & _OTHERS and not _sticky(mode):
            raise _untrusted(
                path,
                "is a link that others can rename; remedy: give the path that it leads to",
            )
    return False


def _check_above(number: int, path: Path, found: os.stat_result, above: os.stat_result) -> bool:
    """Raises CheckpointError for a link as _check_way() does, and for a folder whose owner or whose
    writers can exchange what is below it. Members of this user's own groups are trusted in folders
    that a group shares, as computing centres give them to projects: returns True there."""
    mode, user = found.st_mode, found.st_uid
    if stat.S_ISLNK(mode):
        return _check_way(number, path, found, above)
    ours = bool(mode & _SHARED) and _is_own_group(found.st_gid)
    if not (is_trusted_user(user) or ours or _is_unknown(found, above)):
        raise _untrusted(
            path,
            f"belongs to user {user}, who can exchange what is below it; remedy: choose a folder "
            "below ones of root, of you, or that a group of yours shares",
        )
    by_owner = not (is_trusted_user(user) or _is_hidden(user))  # root is hidden, too, if any is
    if not mode & _OTHERS or _sticky(mode):
        return by_owner
    if mode & stat.S_IWOTH:
        who, remedy = "others", "chmod o-w"
    elif not (ours or _is_hidden(found.st_gid, "gid")):
        who, remedy = f"group {found.st_gid}, which is not yours,", "chmod g-w"
    elif named := _named_in_acl(number):
        who, remedy = named, "setfacl -b"
    else:
        return True
    raise _untrusted(
        path,
        f"{who} can write to (mode {stat.S_IMODE(mode):o}), and so exchange what is below it; "
        f"remedy: look at what is there, then {remedy} {path}, or chmod +t",
    )


def _named_in_acl(number: int) -> str:
    """Another user, or a group that is not this user's, that a folder's access control list lets
    write; "" for none."""
    try:
        entries = os.getxattr(f"/proc/self/fd/{number}", "system.posix_acl_access")[4:]
    except OSError:  # there is no list
        return ""
    for tag, permissions, who in _ACL.iter_unpack(entries):
        if permissions & _ACL_WRITE:
            if tag == _ACL_USER and not is_trusted_user(who):
                return f"user {who}, by its access control list,"
            if tag == _ACL_GROUP and not _is_own_group(who):
                return f"group {who}, by its access control list,"
    return ""


def _untrusted(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"farandole does not trust {path}, which {why}")


def is_trusted_user(user: int) -> bool:
    """True for this user and root."""
    return user == 0 or is_own_user(user)


def _is_own_group(group: int) -> bool:
    return group in (os.getegid(), *os.getgroups()) and not _is_hidden(group, "gid")


def _is_unknown(found: os.stat_result, above: os.stat_result) -> bool:
    """True if the kernel hides whose it is, but only the owner of the folder `above`, such as root,
    can have put it there."""
    return not above.st_mode & _OTHERS and _is_hidden(found.st_uid)


def _is_hidden(number: int, kind: str = "uid") -> bool:
    """True if the kernel does not tell whose a file is: in a user namespace that does not map
    everybody, such as Apptainer's, one number stands for all others. Root is among them."""
    with contextlib.suppress(OSError, ValueError):
        if number == int(Path(f"/proc/sys/kernel/overflow{kind}").read_text()):
            lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
            return sum(int(line.split()[2]) for line in lines) < _EVERYBODY
    return False


def _sticky(mode: int) -> bool:
    """True if others may add to a folder, but not replace what is there."""
    return stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)


@contextlib.contextmanager
def _parent(path: Path, judge: Judge, follows: bool = False) -> Iterator[tuple[int, Path, str]]:
    """The descriptor of the folder in which `path` is, the path without links, and the part of it
    below the first folder that a group shares. It is reached step by step, so that nobody can
    exchange what `judge` has seen: each folder above it and each link, with the folder in which
    that is. `follows` a link at the end, too."""
    whole = path.absolute()
    at, names, links = Path("/"), [*reversed(whole.parts[1:])] or ["/"], 0
    shared: list[str] | None = None
    number = os.open(at, _STEP)
    here = os.fstat(number)
    try:
        while True:
            above, here = here, os.fstat(number)
            if judge(number, at, here, above) and shared is None:
                shared = []
            while (found := _link(number, names, follows)) is not None:
                judge(number, at / names[-1], found, here)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                names += reversed(Path(os.readlink(names.pop(), dir_fd=number)).parts)
            name = names.pop()
            if shared is not None:
                shared.append(name)
            if not names:
                yield number, at / name, "/".join(shared or ())
                return
            step = os.open(name, _STEP, dir_fd=number)
            os.close(number)
            number, at = step, at / name
    finally:
        os.close(number)


def _link(folder: int, names: list[str], follows: bool) -> os.stat_result | None:
    """Looks at the next of these names; returns its status if it is a link to follow."""
    if len(names) == 1 and not follows:
        return None
    try:
        found = os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if len(names) == 1:
            return None
        raise
    return found if stat.S_ISLNK(found.st_mode) else None
