# SPDX-License-Identifier: Apache-2.0
"""Horovod's own examples/pytorch, unmodified: HOROVOD_SOURCE is a checkout of it, which this
repository has no part of. Data are made here, in the formats of what the examples would download.
torchvision and packaging must be installed. Scripts of the same shape that always run are in
tests/horovod_scripts."""

from __future__ import annotations

import os
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from harness.mpirun import MPI_ENVIRONMENT, mpirun
from harness.process import Process

SOURCE = Path(os.environ.get("HOROVOD_SOURCE", "nowhere")) / "examples"
SECONDS = 600.0
pytestmark = [
    pytest.mark.skipif(not SOURCE.is_dir(), reason="HOROVOD_SOURCE names no checkout of Horovod"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="no torchvision"),
]
AS_HOROVOD = [sys.executable, "-m", "farandole.as_horovod"]
SMALL = "--no-cuda --model resnet18 --batch-size 2 --num-warmup-batches 1 --num-iters 1"
MNIST = "--no-cuda --epochs 1 --data-dir data"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data/MNIST and imagenet/{train,val}."""
    draw = np.random.default_rng(0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 256), ("t10k", 64)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8).tobytes()
        labels = draw.integers(0, 10, count, dtype=np.uint8).tobytes()
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
    for part in ("train", "val"):
        for kind in ("a", "b"):
            place = tmp_path / "imagenet" / part / kind
            place.mkdir(parents=True)
            for i in range(4):  # PPM
                pixels = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8).tobytes()
                (place / f"{i}.ppm").write_bytes(b"P6 64 64 255\n" + pixels)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where they lock
    return tmp_path


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("pytorch/pytorch_mnist.py", MNIST),
        ("pytorch/pytorch_mnist.py", f"{MNIST} --use-adasum"),
        ("pytorch/pytorch_mnist.py", f"{MNIST} --fp16-allreduce --gradient-predivide-factor 2.0"),
        ("pytorch/pytorch_synthetic_benchmark.py", f"{SMALL} --num-batches-per-iter 1"),
        (
            "pytorch/pytorch_imagenet_resnet50.py",
            "--no-cuda --epochs 1 --batch-size 2 --val-batch-size 2 "
            "--train-dir imagenet/train --val-dir imagenet/val",
        ),
        ("elastic/pytorch/pytorch_mnist_elastic.py", MNIST),
        (
            "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py",
            f"{SMALL} --num-batches-per-iter 1 --num-batches-per-commit 1",
        ),
        ("adasum/adasum_small_model.py", ""),
    ],
)
def test_example_at_two_ranks(folder: Path, script: str, arguments: str) -> None:
    mpirun([*AS_HOROVOD, str(SOURCE / script), *arguments.split()], 2, SECONDS).check()


def test_mnist_starts_itself(folder: Path) -> None:
    script = str(SOURCE / "pytorch" / "pytorch_mnist.py")
    with Process([*AS_HOROVOD, script, "--num-proc", "2", *MNIST.split()], MPI_ENVIRONMENT) as job:
        assert "Test set: Average loss" in job.end(SECONDS).check().out
