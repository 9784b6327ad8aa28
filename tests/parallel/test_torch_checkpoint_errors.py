# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, can't be written or do not fit: one error on all ranks, and the
file before is whole."""

from __future__ import annotations

import os
import random
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.torch as hvd
from farandole.extras.checkpoints import checkpoint
from harness.checkpoints import bits, folder

__all__ = ["folder"]

PLACES = ["first", "header", "document", "data", "last"]  # where a byte is flipped


# ---- what may be wrong with a file


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    places = (0, 100, header - 200, header + 3, -1)
    if how in PLACES:
        data[places[PLACES.index(how)]] ^= 4
    elif how == "cut":
        del data[-10:]
    elif how == "short":
        del data[4:]
    elif how == "foreign":
        data = bytearray(b"#!/bin/sh\n" * 100)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how != "empty" else b"")


@pytest.mark.parametrize("how", [*PLACES, "cut", "short", "foreign", "empty", "gone"])
def test_a_damaged_file_is_refused_and_the_one_before_it_offered(folder: Path, how: str) -> None:
    model = nn.Linear(3, 2)
    paths = [hvd.save_checkpoint(folder, {"model": model, "n": n}).wait() for n in range(3)]
    before = bits(model.state_dict())
    if fd.rank() == 0:
        damage(paths[2], how)
        damage(paths[1], "data")
    with pytest.raises(hvd.CheckpointError) as caught:
        hvd.load_checkpoint(paths[2] if how == "gone" else folder, {"model": model})
    assert len(set(fd.allgather_object(str(caught.value)))) == 1
    assert str(paths[2]) in str(caught.value)
    assert caught.value.previous == str(paths[0])
    assert bits(model.state_dict()) == before
    assert hvd.load_checkpoint(caught.value.previous, {"model": model}) == {"n": 0}


def test_every_flipped_byte_is_noticed(folder: Path) -> None:
    """Or changes nothing, as one in the header's spaces."""
    path = hvd.save_checkpoint(folder, {"x": torch.arange(4.0), "n": 7}).wait()
    from farandole.extras.checkpoints.file import Checkpoint, CheckpointError, read

    if fd.rank() == 0:
        data, right = path.read_bytes(), read(path)
        assert isinstance(right, Checkpoint)
        generator = random.Random(3)
        for place in generator.sample(range(len(data)), 300):
            path.write_bytes(
                data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
            )
            try:
                found = read(path)
            except CheckpointError:
                continue
            assert isinstance(found, Checkpoint)
            assert bits(found.tensors) == bits(right.tensors), place
            assert found.document == right.document


def test_files_of_others(folder: Path) -> None:
    from safetensors.torch import save_file

    model = nn.Linear(3, 2)
    files: dict[str, Any] = {"others.safetensors": None, "list.pt": [1], "evil.pt": Evil()}
    if fd.rank() == 0:
        save_file(dict(model.state_dict()), folder / "others.safetensors")
        for name in ("list.pt", "evil.pt"):
            torch.save(files[name], folder / name)
    for name in (*files, "missing.pt", "missing.safetensors"):
        with pytest.raises(hvd.CheckpointError, match=name) as caught:
            hvd.load_checkpoint(folder / name, {"model": model})
        assert caught.value.previous is None
        assert len(set(fd.allgather_object(str(caught.value)))) == 1


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/loading-ran-code",)


def test_files_of_torch_save(folder: Path) -> None:
    torch.manual_seed(fd.rank())
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    model(torch.full((1, 3), 1.0 + fd.rank())).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    roots = fd.broadcast_object(bits(state))
    if fd.rank() == 0:
        torch.save(state, folder / "old.pt")
    other = nn.Linear(3, 2)
    adam = hvd.DistributedOptimizer(torch.optim.Adam(other.parameters()))
    assert hvd.load_checkpoint(folder / "old.pt", {"model": other, "optimizer": adam}) == {
        "epoch": 3
    }
    assert bits({"model": other.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}) == roots


# ---- what may be wrong with the disk, or with a rank


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder of rank 0's that holds 1 MB; where nobody may mount, a limit of that for files."""
    disk = folder / "disk"
    mount = False
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fd.rank() == 0:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
        mount = subprocess.run(command, capture_output=True).returncode == 0
        if not mount:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    fd.barrier()
    yield disk
    fd.barrier()
    if mount:
        subprocess.run(["umount", str(disk)], check=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(small_disk: Path, wait: bool) -> None:
    first = hvd.save_checkpoint(small_disk, {"n": 1}).wait()
    large = {"x": torch.zeros(1 << 20)}
    if wait:
        with pytest.raises(hvd.CheckpointError, match=str(small_disk)) as caught:
            hvd.save_checkpoint(small_disk, large)
    else:
        handle = hvd.save_checkpoint(small_disk, large, wait=False)
        with pytest.raises(hvd.CheckpointError, match=str(small_disk)) as caught:
            hvd.save_checkpoint(small_disk, {"n": 2})
        with pytest.raises(hvd.CheckpointError):
            handle.wait()
    assert len(set(fd.allgather_object(str(caught.value)))) == 1
    if fd.rank() == 0:
        assert [path.name for path in small_disk.iterdir()] == [first.name]
    assert hvd.load_checkpoint(small_disk, {}) == {"n": 1}
    assert hvd.save_checkpoint(small_disk, {"n": 2}).wait() != first


def test_a_folder_that_can_not_be_written(folder: Path) -> None:
    hvd.save_checkpoint(folder / "run", {"n": 1})
    read_only = folder / "run"
    bound = False
    if fd.rank() == 0:
        read_only.chmod(0o500)
        if os.geteuid() == 0:  # for whom modes are no hindrance
            bind = ["mount", "--bind", str(read_only), str(read_only)]
            bound = subprocess.run(bind, capture_output=True).returncode == 0
            if not bound:
                read_only = folder / "run" / "checkpoint-00000001.safetensors" / "below a file"
            else:
                subprocess.run(["mount", "-o", "remount,ro,bind", str(read_only)], check=True)
    with pytest.raises(hvd.CheckpointError, match=str(folder)) as caught:
        hvd.save_checkpoint(read_only, {"n": 2})
    assert len(set(fd.allgather_object(str(caught.value)))) == 1
    assert hvd.load_checkpoint(folder / "run", {}) == {"n": 1}
    if bound:
        subprocess.run(["umount", str(read_only)], check=True)
    if fd.rank() == 0:
        (folder / "run").chmod(0o700)


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_disagree(folder: Path) -> None:
    last = fd.rank() == fd.size() - 1
    with pytest.raises(ValueError, match="different entries"):
        hvd.save_checkpoint(folder, {"a" if last else "b": 1})
    with pytest.raises(ValueError, match="wait is"):
        hvd.save_checkpoint(folder, {"a": 1}, wait=last)
    with pytest.raises(TypeError, match=r"state, x\.0, is of type range"):
        hvd.save_checkpoint(folder, {"x": [range(1)] if last else [1]})
    hvd.save_checkpoint(folder, {"model": nn.Linear(3, 2)})
    with pytest.raises(ValueError, match="does not have: it has"):
        hvd.load_checkpoint(folder, {"net" if last else "model": nn.Linear(3, 2)})
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        hvd.load_checkpoint(folder, {"model": nn.Linear(3, 5 if last else 2)})
    assert f"rank {fd.size() - 1}" in str(caught.value)
    assert len(set(fd.allgather_object(str(caught.value)))) == 1
    assert hvd.load_checkpoint(folder, {"model": nn.Linear(3, 2)}) == {}


@pytest.mark.ranks(3, 4)
def test_process_sets_save_apart(folder: Path) -> None:
    halves = [fd.add_process_set([0, 2]), fd.add_process_set([1])]
    mine = next((one for one in halves if one.included()), None)
    if mine is not None:
        own = folder / str(mine.ranks)
        value = {"rank": torch.tensor(fd.rank())}
        hvd.save_checkpoint(own, value, wait=False, process_set=mine)
        assert hvd.load_checkpoint(own, {}, process_set=mine) == value
    for one in halves:
        fd.remove_process_set(one)


@pytest.mark.ranks(3, 4)
def test_who_writes_may_be_another_after_init(folder: Path) -> None:
    """As after a death in elastic training: a set of the same number has other members."""
    numbers = []
    fd.shutdown()  # and the sets of tests before this one
    fd.init()
    for members in ([0, 1], [1, 2]):
        some = fd.add_process_set(members)
        numbers.append(some.process_set_id)
        if some.included():
            hvd.save_checkpoint(folder / str(members), {"n": 1}, wait=False, process_set=some)
            assert hvd.load_checkpoint(folder / str(members), {}, process_set=some) == {"n": 1}
        fd.shutdown()
        fd.init()
    assert len(set(numbers)) == 1


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_came_later_hears_of_a_write_that_failed(folder: Path) -> None:
    if fd.rank() == 0:
        (folder / "file").touch()
    hvd.save_checkpoint(folder / "file" / "below", {"n": 1}, wait=False)
    if fd.rank() > 0:
        checkpoint._writes.clear()  # as in a new process
    with pytest.raises(hvd.CheckpointError, match="no checkpoint was written"):
        hvd.save_checkpoint(folder, {"n": 2})
    assert hvd.save_checkpoint(folder, {"n": 2}).wait()
