# SPDX-License-Identifier: Apache-2.0
"""Decides which users, folders and files this process trusts. May be used from any thread.

A path may lead elsewhere soon after it was checked. Therefore this module opens each folder on the
way, checks the folder's descriptor, and finally opens the file relative to the last folder.
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
_SHARED = stat.S_IWGRP | stat.S_ISGID  # either bit marks a folder that a group shares
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # never waits for a pipe's writer
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/null")
_PLACE = ".farandole-place"  # link inside a folder that records its path below the shared folder
_MOST_LINKS = 40  # most links in a path; the kernel has the same limit
_EVERYBODY = 0xFFFFFFFF  # number of ids in a user namespace that maps all ids
_ACL = struct.Struct("<HHI")  # an entry of acl(5): tag, permissions, and user or group
_ACL_USER, _ACL_GROUP, _ACL_WRITE = 2, 8, 2
Judge = Callable[[int, Path, os.stat_result, os.stat_result], bool]


def is_own_user(user: int) -> bool:
    """Returns True for the user as whom this process runs.

    Returns False for the kernel's overflow user (nobody) in a user namespace that does not map all
    users, because this number stands for every unmapped user there.
    """
    return bool(lib.farandole_is_own_user(user))


@contextlib.contextmanager
def opened(path: Path, within: int) -> Iterator[int]:
    """Opens a folder that only this user may write to. Yields the folder's descriptor.

    `within` is the descriptor of the parent folder, which the caller must have checked. Raises
    OSError, and CheckpointError if another user may write to the folder.
    """
    with _closing(_opened(within, path.name or "/", path, _FOLDER)) as fd:
        yield fd


@contextlib.contextmanager
def safe_working_folder() -> Iterator[None]:
    """Changes to the folder / if others can write to the working folder; changes back at the end.

    Libraries read settings from the working folder when they are loaded. For example, UCX, which
    MPI loads, reads ucx.conf there.
    """
    with contextlib.ExitStack() as stack:
        try:
            before = os.open(".", os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, before)
            found = os.fstat(before)
            reached = found.st_mode & _OTHERS or not is_trusted_user(found.st_uid)
        except OSError:  # the folder can't be opened, so no library can read from it
            reached = False
        if reached:
            os.chdir("/")
            stack.callback(os.fchdir, before)
        yield


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, accessible to this user only. Raises OSError."""
    for each in (*reversed(path.absolute().parents), path):
        if not each.is_dir():
            with contextlib.suppress(FileExistsError):
                each.mkdir(0o700)


class Folder:
    """A folder of this user that nobody has replaced since it was first opened.

    If a group shares a parent folder, the group's members could rename another of this user's
    folders to this folder's path. Therefore this object keeps a descriptor of the folder, and a
    link inside the folder records the folder's path for later processes.
    """

    def __init__(self, path: Path, new: bool = False) -> None:
        """If `new`, the folder must be empty when it is first opened."""
        self.path, self._new = path, new
        self._held: int | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Context manager that yields the folder's descriptor. Raises OSError, and CheckpointError
        if the folder was replaced or if others may write to it or replace it."""
        parent = _parent(self.path, _check_above)
        with parent as (above, last, shared), opened(last, above) as fd:
            if self._held is None:
                with os.scandir(fd) as found:
                    if self._new and any(found):
                        raise _untrusted(self.path, "is not new: somebody has exchanged it")
                self._held = os.dup(fd)
                weakref.finalize(self, os.close, self._held)
            elif not self._is(fd):
                raise CheckpointError(
                    f"{self.path} is not the folder that it was before: somebody has exchanged it; "
                    "remedy: check who may write to the folders above it, then start again"
                )
            if shared:
                _check_place(last, fd, shared)
            yield fd

    def _is(self, fd: int) -> bool:
        assert self._held is not None
        try:
            return os.path.sameopenfile(self._held, fd)
        except OSError:  # a network file system that was away can't compare old descriptors
            return True

    def remove(self) -> None:
        """Removes the contents of the opened folder, even if the folder has been moved, and then
        the empty folder at its path. Raises OSError."""
        for _, folders, files, at in os.fwalk(".", topdown=False, dir_fd=self._held):
            for name in files:
                os.unlink(name, dir_fd=at)
            for name in folders:
                os.rmdir(name, dir_fd=at)
        self.path.rmdir()


def _check_place(path: Path, fd: int, shared: str) -> None:
    """Records a folder's path inside the folder. Raises CheckpointError if the folder already
    records a different path."""
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(shared, _PLACE, dir_fd=fd)
        noted = os.readlink(_PLACE, dir_fd=fd)
    except OSError:
        return  # the folder is read-only or the file system has no links
    if noted != shared:
        raise _untrusted(
            path,
            f"was {noted} before: somebody who may write to a folder above it has renamed it; "
            f"remedy: if that was you, remove {path / _PLACE}",
        )


def open_file(folder_fd: int, name: str, path: Path) -> io.BufferedReader:
    """Opens a file in the folder that has this descriptor. Raises OSError, and CheckpointError if
    another user may write to the file. Errors name `path`."""
    return os.fdopen(_opened(folder_fd, name, path, _READ), "rb")


def _opened(folder_fd: int, name: str, path: Path, flags: int) -> int:
    """Opens a file or folder in the folder that has this descriptor. Raises OSError, and
    CheckpointError if it is a link or if another user may write to it."""
    with contextlib.suppress(FileNotFoundError):
        # Checks before opening, because this error names the owner, unlike the one that open()
        # raises.
        check(path, os.stat(name, dir_fd=folder_fd, follow_symlinks=False))
    fd = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
    try:
        check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def replace_file(
    folder_fd: int,
    name: str,
    new: str,
    parts: Iterable[bytes | memoryview],
    mode: int = 0o600,
    outdated: Callable[[], bool] = lambda: False,
) -> None:
    """Replaces a file in the folder that has this descriptor. After a crash, the file is either the
    old or the new one. `new` is the name of the new file while it is incomplete. Once the new file
    is complete, calls `outdated()` and keeps the old file if this returns True. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder_fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(new, flags, mode, dir_fd=folder_fd), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if outdated():
            os.unlink(new, dir_fd=folder_fd)
            return
        os.replace(new, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:  # otherwise a full disk would stay full
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder_fd)
        raise
    os.fsync(folder_fd)  # otherwise a crash of the machine may undo the rename


def open_lock(folder_fd: int, name: str) -> int:
    """Opens a lock file in the folder that has this descriptor. Raises OSError, and CheckpointError
    if another user may lock the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return _opened(folder_fd, name, Path(name), flags)


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file that the user has named. Replaces an existing file or link.

    Raises OSError, and CheckpointError if a folder on the way is a link that another user may have
    created or may rename.
    """
    if str(path) in _STREAMS:
        path.write_bytes(data)
        return
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    way = _parent(path, _check_way)
    with way as (parent, last, _), _closing(os.open(".", _FOLDER, dir_fd=parent)) as folder_fd:
        replace_file(folder_fd, last.name, f".{last.name}.{secrets.token_hex(8)}", [data], mode)


def read_secret(path: Path, most: int) -> bytes:
    """Reads up to `most` bytes of a regular file that only this user may read, write or replace.

    Follows links. Raises OSError, PermissionError if others have access, and CheckpointError if a
    folder above the file is not trusted.
    """
    path.stat()  # raises if the secret is missing, so that its folders need no check
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
    """Reads the text of a regular file of at most `most` bytes. The file may belong to any user.
    Never waits for the writer of a pipe.

    If `owners` is given, adds the file's owner to this set and does not follow a link at the end of
    the path. Raises OSError, and ValueError if the file is larger or not regular.
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
    """Raises CheckpointError if `path` is a link, or if another user owns it or may write to it."""
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
            f"can be written to by other users (mode {stat.S_IMODE(mode):o}); remedy: check its "
            f"contents, then chmod go-w {path}",
        )


def _check_way(fd: int, path: Path, found: os.stat_result, above: os.stat_result) -> bool:
    """Raises CheckpointError for a link that another user has created or can rename."""
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


def _check_above(fd: int, path: Path, found: os.stat_result, above: os.stat_result) -> bool:
    """Raises CheckpointError for a folder if untrusted users can replace its contents. For a link,
    does the same as _check_way().

    In folders that a group shares, trusts the group's members if this user is one of them, because
    computing centres set up projects in this way. Returns True for such a folder.
    """
    mode, user = found.st_mode, found.st_uid
    if stat.S_ISLNK(mode):
        return _check_way(fd, path, found, above)
    ours = bool(mode & _SHARED) and _is_own_group(found.st_gid)
    if not (is_trusted_user(user) or ours or _is_unknown(found, above)):
        raise _untrusted(
            path,
            f"belongs to user {user}, who can exchange its contents; remedy: choose a folder below "
            "folders that root or you own, or that a group of yours shares",
        )
    by_owner = not (is_trusted_user(user) or _is_hidden(user))  # a hidden user may be root
    if not mode & _OTHERS or _sticky(mode):
        return by_owner
    if mode & stat.S_IWOTH:
        who, remedy = "others", "chmod o-w"
    elif not (ours or _is_hidden(found.st_gid, "gid")):
        who, remedy = f"group {found.st_gid}, which is not yours,", "chmod g-w"
    elif named := _named_in_acl(fd):
        who, remedy = named, "setfacl -b"
    else:
        return True
    raise _untrusted(
        path,
        f"{who} can write to (mode {stat.S_IMODE(mode):o}), and so exchange its contents; "
        f"remedy: check its contents, then {remedy} {path}, or chmod +t",
    )


def _named_in_acl(fd: int) -> str:
    """Returns a text that names another user, or a group without this user, to whom the folder's
    access control list gives write permission. Returns "" if there is none."""
    try:
        entries = os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access")[4:]
    except OSError:  # no access control list
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
    """Returns True for this user and for root."""
    return user == 0 or is_own_user(user)


def _is_own_group(group: int) -> bool:
    return group in (os.getegid(), *os.getgroups()) and not _is_hidden(group, "gid")


def _is_unknown(found: os.stat_result, above: os.stat_result) -> bool:
    """Returns True if the kernel hides the owner of an entry, but only the owner of the folder
    `above` can have created the entry."""
    return not above.st_mode & _OTHERS and _is_hidden(found.st_uid)


def _is_hidden(number: int, kind: str = "uid") -> bool:
    """Returns True if the kernel hides this user or group. In a user namespace that does not map
    all ids, such as Apptainer's, one number stands for all unmapped ids, including root's id."""
    with contextlib.suppress(OSError, ValueError):
        if number == int(Path(f"/proc/sys/kernel/overflow{kind}").read_text()):
            lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
            return sum(int(line.split()[2]) for line in lines) < _EVERYBODY
    return False


def _sticky(mode: int) -> bool:
    """Returns True for a folder in which users may not replace other users' entries."""
    return stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)


@contextlib.contextmanager
def _parent(path: Path, judge: Judge, follows: bool = False) -> Iterator[tuple[int, Path, str]]:
    """Context manager that opens the folder around `path` one component at a time, so that nobody
    can replace a folder after it was checked.

    Yields the folder's descriptor, the path with links resolved, and the part of the path below the
    first folder for which `judge` returns True. `judge` is called with each folder and link on the
    way and with the folder around it. If `follows`, also follows a link at the end of the path.
    """
    whole = path.absolute()
    at, names, links = Path("/"), [*reversed(whole.parts[1:])] or ["/"], 0
    shared: list[str] | None = None
    fd = os.open(at, _STEP)
    here = os.fstat(fd)
    try:
        while True:
            above, here = here, os.fstat(fd)
            if judge(fd, at, here, above) and shared is None:
                shared = []
            while (found := _link(fd, names, follows)) is not None:
                judge(fd, at / names[-1], found, here)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                names += reversed(Path(os.readlink(names.pop(), dir_fd=fd)).parts)
            name = names.pop()
            if shared is not None:
                shared.append(name)
            if not names:
                yield fd, at / name, "/".join(shared or ())
                return
            step = os.open(name, _STEP, dir_fd=fd)
            os.close(fd)
            fd, at = step, at / name
    finally:
        os.close(fd)


def _link(folder: int, names: list[str], follows: bool) -> os.stat_result | None:
    """Returns the status of the next name if that is a link to follow, and otherwise None."""
    if len(names) == 1 and not follows:
        return None
    try:
        found = os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if len(names) == 1:
            return None
        raise
    return found if stat.S_ISLNK(found.st_mode) else None
