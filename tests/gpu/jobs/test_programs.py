# SPDX-License-Identifier: Apache-2.0
"""Programs that users run on GPUs: the doctor, the example; and what NCCL itself says it did."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tests"), "COLUMNS": "250"}
SHARE = """
import os, runpy, sys
from harness import gpu
gpu.share(int(os.environ["OMPI_COMM_WORLD_RANK"]))
"""
LARGE = 64 << 20  # bytes


def test_doctor(mpi_ranks):
    """Every GPU library is found, and what goes by NCCL is right."""
    source = SHARE + 'from farandole.tools.cli import main\nsys.exit(main(["doctor", "--all"]))'
    result = mpi_ranks(source, 2, ENVIRONMENT).finish(timeout=120).check()
    for row in ("CUDA", "NCCL", "NVRTC", "self test, GPU"):
        assert re.search(rf"^ok +{row}", result.out, re.MULTILINE), result.out


@pytest.mark.parametrize("ranks", [1, 4])
def test_kmeans(mpi_ranks, ranks):
    """The result that the example's head states, on any number of ranks."""
    example = ROOT / "examples" / "cupy_kmeans.py"
    source = SHARE + f"runpy.run_path({str(example)!r}, run_name='__main__')"
    result = mpi_ranks(source, ranks, ENVIRONMENT).finish(timeout=120).check()
    expected = re.findall(r"^    (mean \S.*|centres \S.*)$", example.read_text(), re.MULTILINE)[:2]
    assert len(expected) == 2
    assert all(line in result.out for line in expected), result.out


@pytest.mark.parametrize("chosen", ["", "ring", "tree"])
def test_algorithm_of_large_buckets(mpi_ranks, chosen):
    """A ring, unless told otherwise: in NCCL's own words."""
    source = f"""{SHARE}
import torch
import farandole.torch as hvd
hvd.init()
x = torch.full(({LARGE // 4},), hvd.rank() + 1.0, device="cuda")
assert torch.all(hvd.allreduce(x, op=hvd.Sum) == 3)
hvd.shutdown()
"""
    environment = {**ENVIRONMENT, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL,TUNING"}
    if chosen:
        environment["FARANDOLE_NCCL_ALGO"] = chosen
    result = mpi_ranks(source, 2, environment).finish(timeout=120).check()
    used = re.findall(rf"{LARGE} Bytes -> Algo (\w+)", result.out)
    names = {"0": "tree", "1": "ring"}  # older versions print numbers
    assert {names.get(algo, algo.lower()) for algo in used} == {chosen or "ring"}, result.out[
        -8000:
    ]
