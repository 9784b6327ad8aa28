# SPDX-License-Identifier: Apache-2.0
"""The job's secret under MPI: who reads all that the ranks tell each other by MPI derives the key
only where they have none, and hosts whose secrets differ are told so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.mpirun import mpirun

SECRET = "a secret of the job's own"

PROGRAM = """
import os, sys
import numpy as np
import farandole as fd

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["FARANDOLE_JOB_SECRET"] = sys.argv[1 + rank]
try:
    fd.init()
    print("met:", fd.allreduce(np.array([rank + 1.0]), op=fd.Sum)[0], flush=True)
except fd.FarandoleError as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
"""

# A reader notes each message of each allgather, and derives the key as a rank without secret does.
READER = """
import hmac, json, os, struct
from farandole import _library
from farandole.start import bootstrap, mpi_ranks
import farandole as fd

read, used = [], []
allgather = mpi_ranks.Mpi.allgather

def reads(self, data, seconds=None):
    found = allgather(self, data, seconds)
    read.append(found)
    return found

mpi_ranks.Mpi.allgather = reads
if hasattr(bootstrap.Bootstrap, "key"):
    derive = bootstrap.Bootstrap.key

    def key(self, number, blobs):
        used.append((number, blobs, derive(self, number, blobs)))
        return used[-1][2]

    bootstrap.Bootstrap.key = key
fd.init()
if not used:  # farandole before keys were derived: rank 0's was sent, as hex within JSON
    raise SystemExit("the key is among what was read" if read else "nothing was read")
number, blobs, key = used[0]
parts = (b"farandole world 1", str(number).encode(), *read[0], *blobs)
text = b"".join(struct.pack("!Q", len(part)) + part for part in parts)
derived = hmac.digest(b"", text, "sha256")[: len(key)]
everything = b" ".join(part for each in read for part in each)
assert all(blob in everything or blob.hex().encode() in everything for blob in blobs)
assert key not in everything and key.hex().encode() not in everything
print("the reader derives", "the key" if derived == key else "something else", flush=True)
"""


def test_secrets_that_differ_between_hosts(tmp_path: Path) -> None:
    """Every rank says so, and names the variable; none says the secret."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [SECRET, SECRET, "another secret than theirs"]
    job = mpirun([sys.executable, str(tmp_path / "program.py"), *words], 3)
    lines = [line for line in job.check().out.splitlines() if "LibraryError" in line]
    assert len(lines) == 3, job.out
    for line in lines:
        assert "rank 2 has a different secret than rank 0 in FARANDOLE_JOB_SECRET" in line
    assert not [word for word in words if word in job.out]


@pytest.mark.parametrize("words", [[SECRET] * 3, [SECRET, "", SECRET]])
def test_a_secret_of_all_or_of_some(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    job = mpirun([sys.executable, str(tmp_path / "program.py"), *words], 3)
    assert job.check().out.count("met: 6.0") == 3, job.out


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_reader_of_mpi(tmp_path: Path, secret: str) -> None:
    """Plain MPI is as open as its network: without a secret all that the key follows from travels
    there. With one, something that does not travel is missing."""
    (tmp_path / "program.py").write_text(READER)
    env = {"FARANDOLE_JOB_SECRET": secret, "FARANDOLE_JOB_SECRET_FILE": "none"}
    job = mpirun([sys.executable, str(tmp_path / "program.py")], 2, env=env).check()
    found = "something else" if secret else "the key"
    assert job.out.count(f"the reader derives {found}") == 2, job.out
