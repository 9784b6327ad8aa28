# SPDX-License-Identifier: Apache-2.0
"""What a machine may lack when init() is called: each is a typed error with the remedy."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from harness.process import ended

HEAD = """
import os, resource, sys
import numpy as np
import farandole as fd
"""
CALL = """
try:
    fd.init()
except fd.LibraryError as error:
    print(f"LibraryError: {error}")
    sys.exit()
assert fd.allreduce(np.ones(2))[0] == 1
print("fine")
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def alone(source: str, *before: str, **variables: str) -> str:
    """What a world of one prints, which must end well."""
    done = ended([*before, sys.executable, "-c", HEAD + source + CALL], **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("files", [14, 16, 18, 20, 4096])
def test_few_files(files: int) -> None:
    """Counted with three that are open: others may come with the tests."""
    out = alone(
        f"os.closerange(3, 256)\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files},) * 2)\n"
    )
    if files == 4096:
        assert out == "fine\n"
    else:
        assert out.startswith("LibraryError: ")
        assert "ulimit -n" in out


USER = 20_011  # who has no process: the limit counts those of a user, and root has none


@as_root
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_few_threads(threads: int) -> None:
    out = alone(
        f"os.setgroups([])\nos.setgid({USER})\nos.setuid({USER})\n"
        f"resource.setrlimit(resource.RLIMIT_NPROC, ({threads},) * 2)\n",
        FARANDOLE_RENDEZVOUS="none",
        OPENBLAS_NUM_THREADS="1",
    )
    if threads == 64:
        assert out == "fine\n"
    else:
        assert "cannot start the thread farandole" in out
        assert "ulimit -u" in out
        assert "pids.max" in out


@as_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_no_proc() -> None:
    shell = ("unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh")
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29713"}
    out = alone("", *shell, **place)
    assert "LibraryError: init(): farandole needs /proc" in out
    assert "mount -t proc proc /proc" in out
