# SPDX-License-Identifier: Apache-2.0
"""SIGKILL while a checkpoint is written: there is always a whole one, and it is the newest that a
rank knew to be written, or one after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.fork import ForkJob
from harness.process import PATIENCE, Process

KILLS = 100

# Forks a process again and again that writes checkpoints as rank 0 does, and kills it when so many
# bytes of one are on the disk, or when a file has its name: fsync and removals follow.
KILLER = """
import os, random, signal, sys, traceback
from pathlib import Path
import torch
from farandole.extras.checkpoints.file import Checkpoint, read, write
from farandole.torch.extension import digest_of

torch.set_num_threads(1)  # threads and forks do not go together
kills, folder = int(sys.argv[1]), Path(sys.argv[2])
generator = random.Random(4)
SIZE = 1 << 16  # elements

def save(n, acknowledge):
    while True:
        n += 1
        x = torch.full((SIZE,), float(n))
        document = {"shared": {"n": n}, "digests": {"x": digest_of(x)}, "own": [{}], "ranks": 1}
        write(folder, Checkpoint(document, {"x": x}), keep=2)
        os.write(acknowledge, n.to_bytes(8, "little"))

def written():
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder / ".part"))
    except FileNotFoundError:
        return 0

def newest():
    return max((p.name for p in folder.glob("checkpoint-*")), default="")

known, cut, most = 0, 0, 3
for kill in range(kills):
    begun = known
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            save(known, send)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(send)
    for _ in range(generator.randrange(3)):
        data = os.read(receive, 8)
        assert data, "see above"
        known = int.from_bytes(data, "little")
    goal = generator.randrange(1, SIZE * 4) if kill % 4 else None
    before = newest()
    while (newest() == before) if goal is None else (written() < goal):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "see above"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut += written() > 0
    while data := os.read(receive, 8):
        known = int.from_bytes(data, "little")
    os.close(receive)
    found = read(folder)
    if found is None:
        assert known == 0
        continue
    n = found.document["shared"]["n"]
    assert known <= n <= known + 1, (known, n)
    assert bool((found.tensors["x"] == n).all())
    # Each save that ends leaves two files; one that is killed, one more.
    most = 3 if known > begun else most + 1
    known = n
    assert len(list(folder.glob("checkpoint-*"))) <= most
print(f"{kills} kills, {cut} in the middle of a file, {known} saves", flush=True)
"""


def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, str(tmp_path / "killer.py"), str(KILLS), str(folder)]
    with Process(command, {}) as process:
        done = process.end(2 * PATIENCE).check()
    words = done.out.split()
    assert int(words[0]) == KILLS
    assert int(words[2]) > KILLS // 4, done.out
    assert int(words[-2]) > KILLS // 4, done.out


OF_TWO = """
import os, sys
import torch
import farandole.torch as hvd

folder, moment = FOLDER, MOMENT
hvd.init()
own = torch.full((1000,), float(hvd.rank()))
hvd.save_checkpoint(folder, {"x": own, "n": 1})
handle = hvd.save_checkpoint(folder, {"x": own, "n": 2}, wait=False) if moment == "after" else None
if hvd.rank() == 1:
    print("here", flush=True)
    os.kill(os.getpid(), 9)
try:
    handle.wait() if handle else hvd.save_checkpoint(folder, {"x": own, "n": 2})
except hvd.PeerError as error:
    print("PeerError", handle.outcome()[1] if handle else "", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(("moment", "left"), [("before", 1), ("after", 2)])
def test_another_rank_dies(
    fork_ranks: Callable[..., ForkJob], tmp_path: Path, moment: str, left: int
) -> None:
    """What has been gathered before is written; else the file before stays."""
    from farandole.extras.checkpoints.file import Checkpoint, read

    folder = tmp_path / "run"
    source = OF_TWO.replace("FOLDER", repr(str(folder))).replace("MOMENT", repr(moment))
    job = fork_ranks(source, 2)
    results = job.finish()
    assert [r.returncode for r in results] == [3, -9], job.output()
    found = read(folder)
    assert isinstance(found, Checkpoint)
    assert found.document["shared"]["n"] == left
    assert found.tensors["/1/x"].tolist() == [1.0] * 1000


def test_the_end_of_a_program_waits_and_tells(
    fork_ranks: Callable[..., ForkJob], tmp_path: Path
) -> None:
    """Nobody calls wait(): the file is written, or the error is printed."""
    source = """
import sys
import torch
import farandole.torch as hvd
hvd.init()
hvd.save_checkpoint(FOLDER, {"x": torch.ones(1 << 20)}, wait=False)
"""
    good, bad = tmp_path / "run", tmp_path / "file" / "run"
    (tmp_path / "file").write_text("in the way")
    for folder in (good, bad):
        job = fork_ranks(source.replace("FOLDER", repr(str(folder))), 2)
        assert [r.returncode for r in job.finish()] == [0, 0], job.output()
        told = f"farandole: no checkpoint was written to {folder}" in job.output()
        assert told == (folder is bad), job.output()
    assert (good / "checkpoint-00000001.safetensors").exists()
