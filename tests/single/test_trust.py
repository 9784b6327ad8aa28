# SPDX-License-Identifier: Apache-2.0
"""Folders above those of commits, which another user may rename: what is refused
there, and what computing centres and systems have as a rule."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import farandole as fd
from farandole import commits
from farandole.commits import FILE, Saved, newest_commit
from farandole.launch.disk import JobFolder
from farandole.membership.messages import Commit
from farandole.membership.scheduler import NotReady
from farandole.start.secret import job_secret
from farandole.trust import Folder
from harness.commits import OTHER, linked, owned_by_another, read_commit, write_commit

NOBODY = 0xFFFFFFFF  # in an entry that names no user


def supervised(folder: Path) -> JobFolder:
    """The folder as a supervisor opens it."""
    return JobFolder(Folder(folder), "a", print, lambda: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "call-1"


def of_another_group(path: Path) -> None:
    owned_by_another(path)
    os.chown(path, 0, OTHER)
    path.chmod(0o775)


def exchangeable_link(path: Path) -> None:
    """Another user's, in a folder such as /tmp."""
    linked(path)
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.lchown(path, OTHER, OTHER)
    path.parent.chmod(0o1777)


def renamable_link(path: Path) -> None:
    """This user's, for something else: a member of the group gives it this name."""
    linked(path)
    path.parent.chmod(0o2775)


def in_an_acl(path: Path) -> None:
    """For ls the entry's permission is the group's, and the group is this user's."""
    if os.geteuid():
        pytest.skip("only root is sure to have no such group")
    path.chmod(0o775)
    entries = [(1, 7, NOBODY), (2, 7, OTHER), (4, 5, NOBODY), (16, 7, NOBODY), (32, 5, NOBODY)]
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", data)
    except OSError as reason:
        pytest.skip(f"no access control lists here: {reason}")


EXCHANGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another": (owned_by_another, "belongs to user 65534, who can exchange"),
    "of all": (lambda path: path.chmod(0o777), "others can write to .*chmod o-w"),
    "of another group": (of_another_group, "group 65534, which is not yours, can write to"),
    "another in its ACL": (in_an_acl, "user 65534, by its access control list, .*setfacl -b"),
    "a link in a shared folder": (renamable_link, "is a link that others can rename"),
    "another's link": (exchangeable_link, "is a link of user 65534"),
}


@pytest.mark.parametrize("how", EXCHANGED)
@pytest.mark.parametrize("above", [1, 2])
def test_a_folder_that_others_may_exchange(tmp_path: Path, above: int, how: str) -> None:
    """Another user renames a folder above the commits', and another job's is there instead."""
    top = tmp_path / "far" / "near"
    folder = top / "kept" / "call-1"
    write_commit(folder, {"step": 3})
    path = [top, top.parent][above - 1]
    change, text = EXCHANGED[how]
    change(path)
    for act in (
        lambda: read_commit(folder, {}),
        lambda: write_commit(folder, {"step": 4}),
        lambda: newest_commit(folder.parent),
        lambda: supervised(folder.parent),
    ):
        with pytest.raises(fd.CheckpointError, match=f"{path}, which .*{text}"):
            act()


@pytest.mark.parametrize("how", EXCHANGED)
def test_a_secret_that_others_may_exchange(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "near" / "job-secret"
    path.parent.mkdir()
    path.write_text("a secret of the job's own")
    path.chmod(0o600)
    monkeypatch.setenv("FARANDOLE_JOB_SECRET_FILE", str(path))
    assert job_secret() == b"a secret of the job's own"
    change, text = EXCHANGED[how]
    change(path.parent)
    with pytest.raises(fd.LibraryError, match=f"{path.parent}, which .*{text}"):
        job_secret()


def shared(path: Path) -> None:
    """As computing centres give it to a project: its leader's, and a group of this user's works
    there."""
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, OTHER, os.getegid())
    path.chmod(0o2770)


HARMLESS: dict[str, Callable[[Path], object]] = {
    "as /tmp": lambda path: path.chmod(0o1777),
    "umask 002": lambda path: path.chmod(0o775),
    "a project's": shared,
    "this user's link": linked,
}


@pytest.mark.parametrize("how", HARMLESS)
def test_folders_above_that_are_no_danger(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "far" / "near" / "kept" / "call-1"
    write_commit(folder, {"step": 3})
    HARMLESS[how](tmp_path / "far")
    write_commit(folder, {"step": 4})
    assert read_commit(folder, {}) == {"step": 4}


@pytest.mark.parametrize("who", ["a writer", "a supervisor"])
def test_a_folder_that_a_member_of_the_group_exchanges(tmp_path: Path, who: str) -> None:
    """It is checked again at each use: all goes where it went first, or nowhere."""
    project, kept, other = (tmp_path / name for name in ("project", "project/a", "project/b"))
    write_commit(other / "call-1", {"step": 7})
    project.chmod(0o2770)
    before = (other / "call-1" / FILE).read_bytes()
    writer = commits.Writer(kept / "call-1")
    answered = threading.Event()
    supervisor = JobFolder(Folder(kept), "a", print, answered.set)
    writer.write(Saved({"step": 1}), Commit(1, 1))
    kept.rename(project / "gone")
    other.rename(kept)
    write = partial(writer.write, Saved({"step": 2}), Commit(1, 2))

    def ask() -> object:
        while True:
            try:
                return supervisor.newest_commit()
            except NotReady:
                assert answered.wait(30)

    with pytest.raises(fd.CheckpointError, match="somebody has exchanged it"):
        (write if who == "a writer" else ask)()
    assert (kept / "call-1" / FILE).read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_files_of_a_user_whom_the_kernel_does_not_tell_from_this_one(folder: Path) -> None:
    """In a container nobody stands for all users that are not mapped. A process that is nobody
    there took their commits for its own."""
    write_commit(folder, {"step": 3})
    for path in (folder.parent, folder, folder / FILE):
        os.chown(path, 4321, 4321)
        path.chmod(0o755)
    for path in [folder.parent.parent, *folder.parents[2:]]:
        path.chmod(path.stat().st_mode | 0o011)
    source = f"""
        import ctypes, os, pathlib
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text("65534 0 1")
        from farandole import commits
        print("runs as", os.geteuid(), "its files are of", os.stat({str(folder)!r}).st_uid)
        print(commits.read_commit(pathlib.Path({str(folder)!r}), commits.Saved({{}})))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces here")
    assert "runs as 65534 its files are of 65534" in done.stdout, done.stderr
    assert "step" not in done.stdout
    assert "belongs to user 65534" in done.stderr


def test_folders_that_change_places_between_two_starts(tmp_path: Path) -> None:
    """A member of the group renames them: a job went on from another one's state."""
    project = tmp_path / "project"
    kept, other = project / "a" / "kept", project / "b" / "kept"
    for number, each in enumerate((kept, other)):
        write_commit(each / "call-1", {"step": number})
    project.chmod(0o2770)
    for number, each in enumerate((kept, other)):
        write_commit(each / "call-1", {"step": 10 + number})
    (project / "a").rename(project / "c")
    (project / "b").rename(project / "a")
    for act in (
        lambda: read_commit(kept / "call-1", {}),
        lambda: write_commit(kept / "call-1", {"step": 4}),
        lambda: supervised(kept),
    ):
        with pytest.raises(fd.CheckpointError, match="kept, which was b/kept before: "):
            act()
    (kept / ".farandole-place").unlink()  # as the error says, if it was the user
    assert read_commit(kept / "call-1", {}) == {"step": 11}


ELSEWHERE = """
import os, sys
from farandole.trust import safe_working_folder  # before: this user may not read Python's files
os.chdir(sys.argv[1])
os.setuid(int(sys.argv[2]))
for _ in range(2):
    with safe_working_folder():
        print("works at", os.getcwd())
    print("and again at", os.getcwd())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("user", [0, OTHER])
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_where_libraries_are_loaded(tmp_path: Path, mode: int, user: int) -> None:
    """In / if others may write to the working folder; also by a user who may not enter it."""
    tmp_path.chmod(mode)
    words = [sys.executable, "-c", ELSEWHERE, str(tmp_path), str(user)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    place = "/" if mode & 0o022 else tmp_path
    assert done.stdout.splitlines() == [f"works at {place}", f"and again at {tmp_path}"] * 2


@pytest.fixture
def rooted() -> Iterator[Path]:
    """A new folder below ones to which only root may write, unlike /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/lib") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


IN_NAMESPACE = """
import ctypes, os, pathlib, sys
from farandole import commits  # before: this user may not read Python's files
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([])
os.setgid(4321)
os.setuid(4321)
libc.prctl(4, 1)  # PR_SET_DUMPABLE: else /proc/self is root's
assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
pathlib.Path("/proc/self/setgroups").write_text("deny")
pathlib.Path("/proc/self/uid_map").write_text("1234 4321 1")
print("runs as", os.geteuid(), flush=True)
for folder in sys.argv[1:]:
    print(commits.read_commit(pathlib.Path(folder), commits.Saved({})), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_a_folder_has_the_same_place_in_a_container(rooted: Path) -> None:
    """The kernel hides there that root owns the folders above, and which group shares one."""
    project = rooted / "project"
    folders = [project / name / "call-1" for name in "ab"]
    for number, folder in enumerate(folders):
        write_commit(folder, {"step": number})
    project.chmod(0o2775)
    for number, folder in enumerate(folders):
        write_commit(folder, {"step": 10 + number})
    for path in project.rglob("*"):
        os.lchown(path, 4321, 4321)

    def read() -> str:
        done = subprocess.run(
            [sys.executable, "-c", IN_NAMESPACE, *map(str, folders)],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if "Operation not permitted" in done.stderr:
            pytest.skip("no user namespaces here")
        return done.stdout + done.stderr

    found = read()
    assert "'step': 10" in found, found
    assert "'step': 11" in found, found
    (project / "a").rename(project / "c")
    (project / "b").rename(project / "a")
    found = read()
    assert "was b before" in found, found
    assert "step': 11" not in found


def test_no_folder_on_the_way_is_made_for_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_commit(tmp_path / "new" / "deep" / "kept" / "call-1", {"step": 1})
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.rglob("*"))
    assert read_commit(tmp_path / "new" / "deep" / "kept" / "call-1", {}) == {"step": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_a_lock_of_another_user_in_a_sticky_folder(tmp_path: Path) -> None:
    """Whoever made the file could hold its lock for ever: the job says whose it is, and ends."""
    tmp_path.chmod(0o1777)
    (tmp_path / "job.lock").touch()
    (tmp_path / "job.lock").chmod(0o666)
    os.chown(tmp_path / "job.lock", OTHER, OTHER)
    with pytest.raises(fd.CheckpointError, match=f"job.lock, which belongs to user {OTHER}"):
        supervised(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_folders_of_another_user_in_a_sticky_one(tmp_path: Path) -> None:
    """They are not the job's: it ended when one was there."""
    tmp_path.chmod(0o1777)
    commits.write_commit(tmp_path / "call-1", Saved({}), Commit(3, 1))
    (tmp_path / "call-x").mkdir()
    os.chown(tmp_path / "call-x", OTHER, OTHER)
    assert newest_commit(tmp_path) == Commit(3, 1)


HIDDEN = """
import ctypes, os, pathlib, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
pathlib.Path("/proc/self/setgroups").write_text("deny")
pathlib.Path("/proc/self/uid_map").write_text("0 0 1")
from farandole.start.secret import job_secret
from farandole.trust import write_file
path = pathlib.Path(sys.argv[1])
print("its owner is", os.lstat(path).st_uid)
try:
    write_file(path / "out", b"overwritten")
except Exception as error:
    print(error)
print("found", job_secret())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("where", ["below a sticky folder", "below root's"])
def test_whose_a_file_is_may_be_hidden(tmp_path: Path, where: str) -> None:
    """In a container such as Apptainer's another user looks like root. Where others may make files
    such an owner is nobody's."""
    home, secret = tmp_path / "home" / "farandole", tmp_path / "known"
    home.mkdir(parents=True)
    for each in [tmp_path, tmp_path.parent, tmp_path.parent.parent]:
        each.chmod(each.stat().st_mode | 0o011)
    home.parent.chmod(0o1777 if "sticky" in where else 0o755)
    secret.write_text("known to the stranger")
    secret.chmod(0o600)
    (home / "job-secret").symlink_to(secret)
    (home / "out").symlink_to(tmp_path / "thesis")
    for path in (home, home / "job-secret", home / "out"):
        os.lchown(path, 4321, 4321)
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, str(home)],
        env={**os.environ, "XDG_CONFIG_HOME": str(home.parent), "FARANDOLE_JOB_SECRET": ""},
        capture_output=True,
        text=True,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces here")
    assert "its owner is 65534" in done.stdout, done.stderr
    assert not (tmp_path / "thesis").exists()
    assert ("found b'known" in done.stdout) == ("sticky" not in where)
    if "sticky" in where:
        assert "home/farandole, which belongs to user 65534" in done.stderr


def test_links_that_lead_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(fd.CheckpointError, match="Too many levels of symbolic links"):
        read_commit(tmp_path / "a" / "kept" / "call-1", {})


@pytest.mark.parametrize(
    ("first", "second", "orphans"),
    [("a", "a", False), ("a", "b", True), ("a", "", True), ("", "a", True), ("", "", True)],
)
def test_processes_of_a_killed_supervisor(
    tmp_path: Path, first: str, second: str, orphans: bool
) -> None:
    def supervisor(host: str) -> JobFolder:
        return JobFolder(Folder(tmp_path / "kept"), host, print, lambda: None)

    killed = supervisor(first)
    assert not killed.orphans
    os.close(killed._lock)
    ended = supervisor(second)
    assert ended.orphans == orphans
    ended.close()
    os.close(ended._lock)
    assert not supervisor(second).orphans
