# SPDX-License-Identifier: Apache-2.0
"""Who reads all packets between the supervisor of an elastic job and its hosts learns no variable
of the environment, no secret and no key."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from harness.hosts import simulated_hosts
from harness.supervised import SupervisedJob

PROGRAM = """
import os
import numpy as np
import farandole as fd
from farandole.start import agent_client
from farandole.start.bootstrap import Bootstrap

derived = getattr(Bootstrap, "key", lambda self, *rest: b"")
def key(self, *rest):
    found = derived(self, *rest)
    print("the key is", found.hex(), flush=True)
    return found
Bootstrap.key = key

fd.init()
print("the secret is", agent_client._client.secret.hex(), flush=True)
total = fd.allreduce(np.array([1.0 + fd.rank()]), op=fd.Sum)[0]
print(f"rank {fd.rank()} has {os.environ['HF_TOKEN']} {os.environ['MINE']} {total:g}", flush=True)
"""
TOKEN, MINE = "hf_QXGmTzRsWvLkPnBd", "a-word-of-my-own"
ALL_PACKETS = 3


class Reader:
    """Reads all that passes an interface of this machine."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PACKETS))
        self._socket.bind((interface, 0))
        self._read: list[bytes] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                self._read.append(self._socket.recv(1 << 17))

    def finish(self) -> bytes:
        """All of it."""
        self._socket.close()
        return b"\n".join(self._read)


def test_a_reader_of_the_network_learns_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    with simulated_hosts(tmp_path, [1, 1]) as hosts:
        words = ["-np", "2", "-H", hosts.places(), "-x", f"MINE={MINE}"]
        environment = {**hosts.environment(), "HF_TOKEN": TOKEN}
        reader = Reader(hosts._bridge)
        argv = [sys.executable, "program.py"]
        with SupervisedJob(words, argv, environment) as job:
            out = job.finish().check().out
        read = reader.finish()
    for rank in range(2):
        assert f"rank {rank} has {TOKEN} {MINE} 3" in out, "the ranks have their environment"
    for proof in (b'["job"', b'["status"', b'["blob"', b"program.py"):
        assert proof in read, "the reader reads what supervisor and agents say"
    secrets = {line.split()[-1] for line in out.splitlines() if line.startswith("the secret is")}
    assert len(secrets) == 1, "both ranks have the job's"
    told = {TOKEN, MINE, *secrets}
    assert not [word for word in told if word.encode() in read], "it has read a secret"
    keys = {line.split()[-1] for line in out.splitlines() if line.startswith("the key is")}
    assert len(keys) == 1, "both ranks derive the same key"
    assert not [key for key in keys if key.encode() in read or bytes.fromhex(key) in read]
