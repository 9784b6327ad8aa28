# SPDX-License-Identifier: Apache-2.0
"""Unix sockets of a job: strangers of the host who call them, take their names or their folder, and
containers that do not share it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from farandole.launch.place import free_port
from harness.commands import needs_root
from harness.process import Process

pytestmark = needs_root

# Calls each of these sockets until its backlog is full, and stays.
CROWD = """
import os, signal, socket, sys
os.setuid(65534)
listed = open("/proc/net/unix").read()
seen, calls, refused, kept = 0, 0, 0, []
for name in sys.argv[1:]:
    seen += name in listed
    try:
        while True:
            kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            kept[-1].setblocking(False)
            kept[-1].connect(name if name.startswith("/") else chr(0) + name)
            calls += 1
    except BlockingIOError:
        pass
    except PermissionError:
        refused += 1
print(f"a stranger saw {seen} sockets, called {calls} times, was refused by {refused}", flush=True)
signal.pause()
"""

PARTED = f"""
import re, subprocess, sys
import numpy as np
import farandole as fd
from farandole import runtime
from farandole._library import lib

crowd, with_world = [], runtime._with_world
def meet(*words):
    if words[0].rank == 1 and words[-1] == lib.farandole_probe:
        name = rb"(?:/tmp/farandole-0/[0-9a-f]+|farandole)-[0-9a-f]{{32}}"
        names = re.findall(name, b" ".join(words[2]))
        command = [sys.executable, "-c", {CROWD!r}, *sorted(names)]
        crowd.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        print(crowd[0].stdout.readline(), end="", flush=True)
    return with_world(*words)
runtime._with_world = meet

fd.init()
total = fd.allreduce(np.full(3, fd.rank() + 1.0), op=fd.Sum)
print(f"rank {{fd.rank()}} shares memory with {{fd.local_size()}} and has {{total}}", flush=True)
fd.shutdown()
for process in crowd:
    process.kill()
"""


def test_a_crowd_at_their_sockets_does_not_part_ranks(fork_ranks):
    job = fork_ranks(PARTED, 2)
    codes = [result.returncode for result in job.finish()]
    text = job.output()
    assert "a stranger saw 2 sockets, called 0 times, was refused by 2" in text
    for rank in range(2):
        assert f"rank {rank} shares memory with 2 and has [3. 3. 3.]" in text
    assert codes == [0, 0]


SQUATTER = """
import os, signal, socket, sys
os.setuid(65534)
end = socket.socket(socket.AF_UNIX)
try:
    end.bind(sys.argv[1].replace("@", chr(0)))
    end.listen()
    print("took it", flush=True)
except PermissionError:
    print("was refused", flush=True)
signal.pause()
"""

MEETS = """
import numpy as np
import farandole as fd

fd.init()
total = fd.allreduce(np.full(3, fd.rank() + 1.0), op=fd.Sum)
print(f"rank {fd.rank()} has {total}", flush=True)
fd.shutdown()
"""


@pytest.fixture
def places() -> list[dict[str, str]]:
    """torchrun's variables for two ranks."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), **job} for rank in range(2)]


def meeting_of(place: dict[str, str]) -> str:
    """Where rank 0 will listen, as anybody can find out who knows the variables."""
    told = (
        "from farandole.start.torchrun import open_rendezvous\n"
        "print(open_rendezvous()[0].replace(chr(0), '@'))"
    )
    with Process([sys.executable, "-c", told], place) as asks:
        return asks.end().check().out.split()[-1]


def met(places: list[dict[str, str]], folder: Path) -> None:
    """Both ranks have met and end well."""
    (folder / "meets.py").write_text(MEETS)
    program = [sys.executable, str(folder / "meets.py")]
    with Process(program, places[0]) as first, Process(program, places[1]) as second:
        ends = [first.end(), second.end()]
    for rank, end in enumerate(ends):
        assert f"rank {rank} has [3. 3. 3.]" in end.check().out


def test_nobody_takes_the_place_where_ranks_of_torchrun_meet(places, tmp_path):
    path = meeting_of(places[1])
    command = [sys.executable, "-c", SQUATTER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        said = squatter.stdout.readline()
        try:
            met(places, tmp_path)
        finally:
            squatter.kill()
    assert said == "was refused\n"
    assert not Path(path).exists(), "rank 0 has removed it"


def test_what_a_killed_rank_leaves_is_not_in_the_way(places, tmp_path):
    path = Path(meeting_of(places[1]))
    (tmp_path / "meets.py").write_text(MEETS)
    with Process([sys.executable, str(tmp_path / "meets.py")], places[0]) as killed:
        while not path.exists():
            assert killed.returncode is None, killed.output
        killed.kill()
        killed.end()
    assert path.is_socket()
    os.utime(path, (1, 1))  # a name that has just been made is left alone
    met(places, tmp_path)
    assert not path.exists()


# Has the core find other folders than Python, which has met the other ranks already.
APART = """
import ctypes, os, sys
import numpy as np
import farandole as fd
from farandole import runtime

libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, BIND, PRIVATE = 0x20000, 4096, (1 << 18) | 16384

def mount(of, at, kind, flags):
    if libc.mount(os.fsencode(of), os.fsencode(at), kind, flags, None) != 0:
        raise OSError(ctypes.get_errno(), "mount", at)

def see(folder):
    own = f"/tmp/farandole-{os.geteuid()}"
    os.makedirs(own, 0o700, exist_ok=True)
    assert libc.unshare(NEW_MOUNTS) == 0
    mount("none", "/", None, PRIVATE)
    mount(folder, own, None, BIND)

start = runtime._start
def apart(agreement, sets):
    enter(agreement.job.rank)
    return start(agreement, sets)
runtime._start = apart
"""

CONTAINERS = (
    APART
    + """
def enter(rank):
    if rank >= 2:
        see(sys.argv[0] + ".room")

fd.init()
total = fd.allreduce(np.full(3, fd.rank() + 1.0), op=fd.Sum)
place = f"{fd.local_rank()} of {fd.local_size()}, {fd.cross_rank()} of {fd.cross_size()}"
print(f"rank {fd.rank()} is {place} and has {total}", flush=True)
fd.shutdown()
"""
)


def test_containers_with_a_tmp_each_are_hosts_of_one_job(fork_ranks, tmp_path):
    (tmp_path / "program.py.room").mkdir(mode=0o700)
    job = fork_ranks(CONTAINERS, 4)
    codes = [result.returncode for result in job.finish()]
    text = job.output()
    for rank in range(4):
        assert f"rank {rank} is {rank % 2} of 2, {rank // 2} of 2 and has [10. 10. 10.]" in text
    assert "shares no memory" not in text
    assert codes == [0] * 4


TAKEN = (
    APART
    + """
def enter(rank):
    room = sys.argv[0] + ".room"
    os.makedirs(room, exist_ok=True)
    see(room)
    mount("tmpfs", "/dev/shm", b"tmpfs", 0)
    memory = f"/dev/shm/farandole-{os.geteuid()}"
    os.mkdir(memory)
    for taken in (room, memory):
        os.chown(taken, 65534, 65534)

try:
    fd.init()
    print(f"rank {fd.rank()} of {fd.size()} has {fd.allreduce(np.ones(1))}", flush=True)
except fd.LibraryError as reason:
    print(reason, flush=True)
"""
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stranger_who_has_taken_all_folders_is_named(fork_ranks, ranks):
    """A rank that is alone needs no folder."""
    job = fork_ranks(TAKEN, ranks, {"XDG_RUNTIME_DIR": "", "HOME": "/nowhere"})
    codes = [result.returncode for result in job.finish()]
    text = job.output()
    if ranks == 1:
        assert "rank 0 of 1 has [1.]" in text
    else:
        says = f"farandole-{os.geteuid()}: belongs to user 65534"
        begins = "init() failed on rank 0, 1: LibraryError: there is no folder for this user's"
        assert text.count(begins) == 2
        assert text.count(f"/tmp/{says}; /dev/shm/{says}; /nowhere/.farandole: ") == 2
    assert codes == [0] * ranks


def test_a_stranger_does_not_take_the_folder_at_home(fork_ranks):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:  # a short name, and not in /tmp
        job = fork_ranks(TAKEN, 2, {"XDG_RUNTIME_DIR": "", "HOME": home})
        codes = [result.returncode for result in job.finish()]
    text = job.output()
    assert [text.count(f"rank {rank} of 2 has [1.]") for rank in range(2)] == [1, 1], text
    assert codes == [0, 0]
